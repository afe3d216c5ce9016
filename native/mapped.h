/* mapped.h: whether memory can be touched at all. */
#pragma once
#include <stdbool.h>
#include <stdint.h>

/* All of the range is memory of this process now, which says nothing of access rights. About 0.2 us: so that a wild pointer is an error and no crash. */
bool memory_is_mapped(uint64_t address, uint64_t bytes);
