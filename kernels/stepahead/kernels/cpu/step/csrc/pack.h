// Packing a tensor into its matrix.
#pragma once
#include "coded.h"
#include "model.h"

namespace step {

// Packs `source` [outputs][num_inputs], row-major, in the model's weight type; `outputs` [columns of the matrix] says
// which of them goes to which column, -1: none. A coded matrix whose weights do not fit the code becomes plain.
// Returns 0 or ERROR_MEMORY.
int pack(Model& m, Linear& matrix, const void* source, int64_t num_inputs, bool inputs_are_heads,
         const int32_t* outputs);

}  // namespace step
