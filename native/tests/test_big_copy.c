/* Host memory: every length at every alignment arrives whole and touches nothing beside it; what is not mapped is found. */
#include "big_copy.c"
#include "bytes.h"
#include "check.h"
#include "ring.h"
#include <sys/auxv.h>
#include <sys/mman.h>

enum { ROOM = 64 << 10, RANGES = 300, RANGE = 12345 };

static void check_copy(uint8_t *to, uint8_t *from, size_t at, size_t source, size_t bytes, const void *next)
{
    memset(to, 0xee, ROOM);
    big_copy(to + at, from + source, bytes, next);
    CHECK(!memcmp(to + at, from + source, bytes));
    CHECK(all_are(to, at, 0xee) && all_are(to + at + bytes, ROOM - at - bytes, 0xee));
}

TEST(test_every_length_and_alignment)
{
    static const size_t lengths[] = { 4096, 8191, 8192, 8193, 16384, 16500, 20000, 40000 };
    uint8_t *to = aligned_alloc(4096, ROOM), *from = aligned_alloc(4096, ROOM);
    for (size_t i = 0; i < ROOM; i++)
        from[i] = (uint8_t)(i * 2654435761u >> 13);
    for (size_t bytes = 0; bytes < 300; bytes++)
        for (size_t at = 0; at < 70; at += 7)
            check_copy(to, from, at, at * 3 % 64, bytes, at % 2 ? from : NULL);
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++)
        for (size_t at = 0; at < 130; at += 13)
            check_copy(to, from, at, at * 5 % 64, lengths[i], at % 2 ? from : (void *)16);   /* it is fetched, never touched */
    free(to);
    free(from);
}

static void check_ranges(uint64_t total)
{
    uint8_t *from = malloc((size_t)RANGES * RANGE), *to = calloc(RANGES, RANGE);
    HcclOneSideOpDesc ranges[RANGES];
    for (size_t i = 0; i < (size_t)RANGES * RANGE; i++)
        from[i] = (uint8_t)(i * 2654435761u >> 11);
    for (size_t i = 0; i < RANGES; i++) {
        size_t turned = i * 7 % RANGES;                     /* 7 and 300 have no common divisor: each range once */
        ranges[i] = (HcclOneSideOpDesc){ to + turned * RANGE, from + turned * RANGE, RANGE, HCCL_DATA_TYPE_UINT8 };
    }
    ring_copy(ranges, RANGES, total);
    CHECK(!memcmp(to, from, (size_t)RANGES * RANGE));
    free(from);
    free(to);
}

TEST(test_ranges_of_a_small_and_of_a_big_step)
{
    check_ranges((uint64_t)RANGES * RANGE);
    check_ranges(1000);
}

TEST(test_what_is_not_mapped_is_found)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    uint8_t *pages = mmap(NULL, 4 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    munmap(pages + 2 * page, page);
    const uint64_t base = (uint64_t)pages, most = UINT64_MAX - 2;
    const uint64_t starts[] = { base, base + page + 1, base, 16, most, most }, bytes[] = { 2 * page, page - 1, 4 * page, 1, 2, 1 << 20 };
    CHECK_EQ(ring_first_unusable(starts, bytes, 6, true), 2);           /* over the hole */
    for (uint32_t i = 2; i < 6; i++)
        CHECK_EQ(ring_first_unusable(&starts[i], &bytes[i], 1, false), 0);
    CHECK_EQ(ring_first_unusable(&starts[1], &page, 1, false), 0);      /* one byte of the hole */
    CHECK_EQ(ring_first_unusable(NULL, NULL, 0, true), 0);
    munmap(pages, 2 * page);
    munmap(pages + 3 * page, page);
}

TEST(test_what_may_not_be_touched_is_found)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), bytes = 2 * page;
    uint8_t *pages = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    uint64_t start = (uint64_t)pages;
    CHECK_EQ(ring_first_unusable(&start, &bytes, 1, true), 1);
    mprotect(pages + page, page, PROT_READ);                /* its end */
    CHECK_EQ(ring_first_unusable(&start, &bytes, 1, true), 0);
    CHECK_EQ(ring_first_unusable(&start, &bytes, 1, false), 1);
    CHECK_EQ(ring_first_unusable(&start, &page, 1, true), 1);
    mprotect(pages, page, PROT_NONE);                       /* its beginning */
    CHECK_EQ(ring_first_unusable(&start, &bytes, 1, false), 0);
    munmap(pages, 2 * page);
    uint64_t drivers = getauxval(AT_SYSINFO_EHDR), byte = 1;            /* the kernel's own code: read-only, and no page of a file's */
    CHECK_EQ(ring_first_unusable(&drivers, &byte, 1, false), 1);
    CHECK_EQ(ring_first_unusable(&drivers, &byte, 1, true), 0);
}

int main(void)
{
    RUN(test_every_length_and_alignment);
    RUN(test_ranges_of_a_small_and_of_a_big_step);
    RUN(test_what_is_not_mapped_is_found);
    RUN(test_what_may_not_be_touched_is_found);
    return check_done();
}
