// Steps that follow each other without their caller.
//
// Between two steps of a model that samples greedily there is nothing to decide: the next step feeds the largest logits'
// tokens. A caller that knows the next step while one runs attaches it, and the last thread of a step begins it:
//
//     caller's host    start 1      follow 2         (results of 1)  follow 3     (results of 2)
//     threads          |step 1 .................|settle|step 2 ...............|settle|step 3 ...
//     who waits             wait 1              |awake, tells    wait 2      |awake, tells
//
// `settle` is one unit of work: it writes the cells, takes what is attached, resolves its tokens. A step whose tokens are
// not there is dropped, with what is attached to it: its caller then finds out. A thread that was off its core goes
// through the steps it missed, so a step stays in memory until all have passed it.
#pragma once
#include "model.h"

namespace step {

Chain* make_chain(int num_threads);  // null: no memory
void delete_chain(Chain* chain);

int32_t start_chain(Model& m, ChainedStep& first);
int32_t follow(Model& m, ChainedStep& before, ChainedStep& next);
uint32_t wait_for(ChainedStep& step);
int64_t count_passed(const Model& m);

}  // namespace step
