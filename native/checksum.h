/* checksum.h: CRC-32C (Castagnoli) of memory that the host can address: by the processor's own instruction (SSE4.2 on x86-64,
 * the CRC extension on AArch64) or, where it has none, by tables. From any thread.
 *
 * Not zlib's: on one core of an AMD EPYC this takes 25 GB/s from the cache and 6.7 from memory (tables: 4.1 and 2.9), where
 * zlib 1.2.13 takes 4.2, and the libraries that are built here need glibc alone.                                      */
#pragma once
#include <stdint.h>

/* Of the bytes that `crc` is of, and of these behind them; of these alone where it is 0. */
uint32_t checksum_of(uint32_t crc, const void *bytes, uint64_t count);
uint32_t checksum_of_by_tables(uint32_t crc, const void *bytes, uint64_t count);  /* the same, slower: for tests and for comparing */
int checksum_is_fast(void);               /* the processor has an instruction for it */

/* Block i of each tensor is added to crc[i]: `bytes` at base[t] + index[i] * stride, of the last block only `tail`. */
void checksum_blocks(uint32_t *crc, const uint64_t *base, uint32_t tensors, const uint64_t *index, uint32_t blocks,
                     uint64_t stride, uint64_t bytes, uint64_t tail);
