/* plain_copy.h: the copy that transfers are compared with: one thread, one memcpy per range, nothing else. */
#pragma once
#include <stddef.h>
#include <stdint.h>

void plain_copy(const uint64_t *targets, const uint64_t *sources, size_t count, size_t bytes, size_t rounds);
