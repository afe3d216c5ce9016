/* grid.h: a place in the ranges of a grid, and the way through them. */
#pragma once
#include <stdbool.h>
#pragma GCC visibility push(default)
#include "ring.h"
#pragma GCC visibility pop

typedef struct cursor { uint32_t tensor, block; uint64_t offset; } cursor;

bool has_range(const ring_grid *g, const cursor *c);
/* The next range of the grid, at most `most` bytes of it; neighbours on both sides are one. */
HcclOneSideOpDesc next_range(const ring_grid *g, cursor *c, uint64_t most);
