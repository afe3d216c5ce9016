/* mapped.h: whether memory can be touched, so that a wild pointer is an error and no crash. */
#pragma once
#include <stdbool.h>
#include <stdint.h>

/* All of the range is memory of this process now, which says nothing of access rights. About 0.2 us. */
bool memory_is_mapped(uint64_t address, uint64_t bytes);

/* And its two ends can be read, or written. About 1 us. */
bool memory_is_usable(uint64_t address, uint64_t bytes, bool writes);
