/* checksum.h: CRC-32C (Castagnoli) of memory that the host can address. It uses the processor's own instruction (SSE4.2 on
 * x86-64, the CRC extension on AArch64), or tables if there is none. Every call may be made from any thread.
 *
 * zlib is not used for two reasons. On one core of an AMD EPYC this code sums 25 GB/s from the cache and 6.7 from memory (with
 * tables: 4.1 and 2.9), zlib 1.2.13 sums 4.2. And the libraries that are built here must need only glibc.              */
#pragma once
#include <stdint.h>

/* Returns the checksum of the bytes that `crc` covers, followed by these. With `crc` 0 it covers only these. */
uint32_t checksum_of(uint32_t crc, const void *bytes, uint64_t count);
uint32_t checksum_of_by_tables(uint32_t crc, const void *bytes, uint64_t count);  /* does the same more slowly, for tests and comparisons */
int checksum_is_fast(void);               /* returns 1 if the processor has an instruction for it */

/* Adds block i of each tensor to crc[i]: `bytes` at base[t] + index[i] * stride; the last block has only `tail` bytes. */
void checksum_blocks(uint32_t *crc, const uint64_t *base, uint32_t tensors, const uint64_t *index, uint32_t blocks,
                     uint64_t stride, uint64_t bytes, uint64_t tail);
