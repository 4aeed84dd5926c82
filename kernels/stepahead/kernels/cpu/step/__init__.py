"""The CPU step library: a whole decoder step in one call of compiled code.

`build` compiles it (once per machine, source and compiler), `library` declares its C functions, `decoder_step` is
what Python uses: `DecoderStep`. The sources are in `csrc`; start at `forward.h`, then `tile.h` and `model.h`.

**Batch invariance.** A token's results are the same bits whatever else the step holds, however its prompt was cut
into chunks and wherever its blocks lie: every sum is taken in one fixed order (`tile.h`, `attention.h`), and the
number of threads or who computes a unit enters no sum. Instruction sets differ from each other, so a set takes one
row as it takes many: AMX multiplies single rows in tiles too (`vector_amx.h`).
"""
