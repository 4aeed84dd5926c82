// Which instruction sets this CPU and its system run, and which of them this library has code for.
#pragma once
#include "model.h"

namespace step {

bool has_isa(Isa isa);
bool left_out(Isa isa);  // it would run here, but the library was built without it

}  // namespace step
