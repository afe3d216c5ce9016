/* checksum.c: CRC-32C. The instruction takes 8 bytes per cycle but answers after three, so three lanes that follow each other in
 * memory are summed at a time; by tables that is twice as fast as one lane. The sum of a lane is brought behind the next one by
 * a table: to append n zero bytes to what was summed is a linear map of its 32 bits.                                  */
#pragma GCC visibility push(default)
#include "checksum.h"
#pragma GCC visibility pop

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>
#ifdef __x86_64__
#include <nmmintrin.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

#define POLYNOMIAL 0x82f63b78u            /* its bits in reverse, as those of everything here: the first bit is the highest power */
#define LANE       1024                   /* bytes */

static pthread_once_t once = PTHREAD_ONCE_INIT;
static uint32_t slices[8][256];           /* of a byte with 0 to 7 zero bytes behind it */
static uint32_t lane_zeros[4][256];       /* of each byte of a sum, with LANE zero bytes behind it */
static bool is_fast;

/* ---- polynomials modulo the polynomial ---- */

static uint32_t times_x(uint32_t a)
{
    return (a >> 1) ^ (a & 1 ? POLYNOMIAL : 0);
}

static uint32_t multiply(uint32_t a, uint32_t b)
{
    uint32_t product = 0;
    for (uint32_t bit = 0x80000000u; bit; bit >>= 1, b = times_x(b))
        if (a & bit)
            product ^= b;
    return product;
}

/* x to the power 8 * bytes */
static uint32_t zeros(uint64_t bytes)
{
    uint32_t power = 0x80000000u, square = 0x00800000u;     /* 1, and x to the 8 */
    for (; bytes; bytes >>= 1, square = multiply(square, square))
        if (bytes & 1)
            power = multiply(power, square);
    return power;
}

static bool has_instruction(void)
{
#ifdef __x86_64__
    return __builtin_cpu_supports("sse4.2");
#elif defined(__aarch64__)
    return getauxval(AT_HWCAP) & (1ul << 7);                /* HWCAP_CRC32 */
#else
    return false;
#endif
}

static void prepare(void)
{
    uint32_t behind = zeros(LANE);
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t sum = byte;
        for (int bit = 0; bit < 8; bit++)
            sum = times_x(sum);
        slices[0][byte] = sum;
        for (int i = 0; i < 4; i++)
            lane_zeros[i][byte] = multiply(byte << 8 * i, behind);
    }
    for (int i = 1; i < 8; i++)
        for (uint32_t byte = 0; byte < 256; byte++)
            slices[i][byte] = slices[0][slices[i - 1][byte] & 255] ^ (slices[i - 1][byte] >> 8);
    is_fast = has_instruction();
}

/* ---- a word, and lanes of words ---- */

static uint64_t word_at(const uint8_t *at)
{
    uint64_t word;
    memcpy(&word, at, sizeof word);
    return word;
}

static uint32_t add_byte(uint32_t sum, uint8_t byte)
{
    return slices[0][(sum ^ byte) & 255] ^ (sum >> 8);
}

static inline uint32_t add_word_by_tables(uint32_t sum, uint64_t word)
{
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    word ^= sum;
    return slices[7][word & 255] ^ slices[6][word >> 8 & 255] ^ slices[5][word >> 16 & 255] ^ slices[4][word >> 24 & 255] ^
           slices[3][word >> 32 & 255] ^ slices[2][word >> 40 & 255] ^ slices[1][word >> 48 & 255] ^ slices[0][word >> 56];
}

#if defined(__x86_64__)
#define WITH_INSTRUCTION __attribute__((target("sse4.2")))
WITH_INSTRUCTION static inline uint32_t add_word(uint32_t sum, uint64_t word)
{
    return (uint32_t)_mm_crc32_u64(sum, word);
}
#elif defined(__aarch64__)
#define WITH_INSTRUCTION
static inline uint32_t add_word(uint32_t sum, uint64_t word)
{
    __asm__(".arch_extension crc\n\tcrc32cx %w0, %w0, %x1" : "+r"(sum) : "r"(word));
    return sum;
}
#endif

static uint32_t behind_lane(uint32_t sum)
{
    return lane_zeros[0][sum & 255] ^ lane_zeros[1][sum >> 8 & 255] ^ lane_zeros[2][sum >> 16 & 255] ^ lane_zeros[3][sum >> 24];
}

/* A function of (sum, at, count) that adds words with `add`. */
#define IN_LANES(attributes, name, add)                                                   \
    attributes static uint32_t name(uint32_t sum, const uint8_t *at, uint64_t count)      \
    {                                                                                     \
        for (; count >= 3 * LANE; at += 3 * LANE, count -= 3 * LANE) {                    \
            uint32_t second = 0, third = 0;                                               \
            for (size_t i = 0; i < LANE; i += 8) {                                        \
                sum = add(sum, word_at(at + i));                                          \
                second = add(second, word_at(at + LANE + i));                             \
                third = add(third, word_at(at + 2 * LANE + i));                           \
            }                                                                             \
            sum = behind_lane(behind_lane(sum) ^ second) ^ third;                         \
        }                                                                                 \
        for (; count >= 8; at += 8, count -= 8)                                           \
            sum = add(sum, word_at(at));                                                  \
        for (; count; at++, count--)                                                      \
            sum = add_byte(sum, *at);                                                     \
        return sum;                                                                       \
    }

IN_LANES(, by_tables, add_word_by_tables)
#ifdef WITH_INSTRUCTION
IN_LANES(WITH_INSTRUCTION, by_instruction, add_word)
#endif

/* ---- for callers ---- */

int checksum_is_fast(void)
{
    pthread_once(&once, prepare);
    return is_fast;
}

uint32_t checksum_of_by_tables(uint32_t crc, const void *bytes, uint64_t count)
{
    pthread_once(&once, prepare);
    return ~by_tables(~crc, bytes, count);
}

uint32_t checksum_of(uint32_t crc, const void *bytes, uint64_t count)
{
#ifdef WITH_INSTRUCTION
    if (checksum_is_fast())
        return ~by_instruction(~crc, bytes, count);
#endif
    return checksum_of_by_tables(crc, bytes, count);
}

void checksum_blocks(uint32_t *crc, const uint64_t *base, uint32_t tensors, const uint64_t *index, uint32_t blocks,
                     uint64_t stride, uint64_t bytes, uint64_t tail)
{
    for (uint32_t t = 0; t < tensors; t++)
        for (uint32_t i = 0; i < blocks; i++)
            crc[i] = checksum_of(crc[i], (const void *)(uintptr_t)(base[t] + index[i] * stride), i + 1 < blocks ? bytes : tail);
}
