// One stack switch for x86-64: saves what the System V ABI asks a callee to save, and nothing else.
//
// ucontext would save signal masks with two system calls a switch, 15 times slower (measured).
#pragma once
#include <cstdlib>

namespace on_host {

constexpr size_t STACK_BYTES = 64 << 10;

extern "C" __attribute__((naked, noinline, visibility("hidden"))) inline void switch_stack(void** /*save*/,
                                                                                          void* /*load*/) {
  asm volatile(
      "pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15; movq %rsp,(%rdi);"
      "movq %rsi,%rsp; popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp; ret");
}

struct Stack {
  char* memory = nullptr;
  void* pointer = nullptr;

  // The next switch to this stack enters `entry`, which must never return.
  void prepare(void (*entry)()) {
    if (memory == nullptr) memory = static_cast<char*>(std::aligned_alloc(64, STACK_BYTES));
    void** top = reinterpret_cast<void**>(memory + STACK_BYTES);
    *--top = nullptr;  // where `entry` would return to; also keeps its stack aligned
    *--top = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; i++) *--top = nullptr;
    pointer = top;
  }

  bool holds(const void* address) const { return address >= memory && address < memory + STACK_BYTES; }
};

}  // namespace on_host
