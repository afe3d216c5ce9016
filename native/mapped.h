/* mapped.h: checks whether memory can be touched, so that a wild pointer is an error instead of a crash. */
#pragma once
#include <stdbool.h>
#include <stdint.h>

/* Returns true if all of the range is memory of this process now, whatever its access rights. Takes about 0.2 us. */
bool memory_is_mapped(uint64_t address, uint64_t bytes);

/* Returns true if, in addition, both ends of the range can be read, or written. Takes about 1 us. */
bool memory_is_usable(uint64_t address, uint64_t bytes, bool writes);
