/* Registered memory of the program is moved to huge pages, which the kernel copies faster, and nothing else of it changes.
 * Where the kernel has no huge page to give there is nothing to be seen.                                                 */
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include "hccl_pair.h"

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

#define HUGE_PAGE ((size_t)2 << 20)
#define BYTES     (4 * HUGE_PAGE)

/* Whole huge pages with inaccessible memory around, so that it is one line of smaps. */
static char *own_memory(void)
{
    char *piece = mmap(NULL, BYTES + 2 * HUGE_PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(piece != MAP_FAILED);
    char *memory = (char *)(((uintptr_t)piece / HUGE_PAGE + 1) * HUGE_PAGE);
    CHECK_OK(mprotect(memory, BYTES, PROT_READ | PROT_WRITE));
    return memory;
}

/* KiB of the mapping that starts at `memory`; -1: there is none. */
static long huge_kib(const char *memory)
{
    char line[512];
    bool inside = false;
    long kib = -1;
    FILE *maps = fopen("/proc/self/smaps", "r");
    while (maps && fgets(line, sizeof line, maps)) {
        uintptr_t from, end;
        if (sscanf(line, "%" SCNxPTR "-%" SCNxPTR " ", &from, &end) == 2)
            inside = from == (uintptr_t)memory && end == from + BYTES;
        else if (inside)
            sscanf(line, "AnonHugePages: %ld", &kib);
    }
    if (maps)
        fclose(maps);
    return kib;
}

/* A sanitizer's memory, a container or an older kernel may have none. */
static bool kernel_has_huge_pages(void)
{
    char *memory = own_memory();
    memset(memory, 1, BYTES);
    bool has = !madvise(memory, BYTES, MADV_COLLAPSE) && huge_kib(memory) == (long)(BYTES >> 10);
    munmap(memory, BYTES);
    if (!has)
        puts("no huge pages here: only contents are compared");
    return has;
}

static void *registered(char *memory, size_t bytes)
{
    void *handle = NULL;
    CommMem mem = {COMM_MEM_TYPE_DEVICE, memory, bytes};
    CHECK_OK(HcclRegisterGlobalMem(&mem, &handle));
    return handle;
}

static void write_all(char *memory)
{
    fill(memory, BYTES, 7);
}

static bool holds_all(const char *memory)
{
    return holds(memory, BYTES, 7);
}

TEST(test_what_was_written_before_stays)
{
    bool has = kernel_has_huge_pages();
    char *memory = own_memory();
    write_all(memory);
    void *handle = registered(memory, BYTES);
    CHECK(holds_all(memory));
    if (has)
        CHECK_EQ(huge_kib(memory), (long)(BYTES >> 10));
    CHECK_OK(HcclDeregisterGlobalMem(handle));
    CHECK(holds_all(memory));
    munmap(memory, BYTES);
}

TEST(test_fresh_memory_is_resident_and_zero)
{
    bool has = kernel_has_huge_pages();
    char *memory = own_memory();
    void *handle = registered(memory, BYTES);
    if (has)
        CHECK_EQ(huge_kib(memory), (long)(BYTES >> 10));
    CHECK(all_are(memory, BYTES, 0));
    CHECK_OK(HcclDeregisterGlobalMem(handle));
    munmap(memory, BYTES);
}

/* A huge page that the range has only a part of belongs to others, too. */
TEST(test_huge_pages_at_the_ends_stay_as_they_are)
{
    bool has = kernel_has_huge_pages();
    char *memory = own_memory();
    write_all(memory);
    void *handle = registered(memory + 4096 + 16, BYTES - 2 * 4096 - 32);
    CHECK(holds_all(memory));
    if (has)
        CHECK_EQ(huge_kib(memory), (long)((BYTES - 2 * HUGE_PAGE) >> 10));
    CHECK_OK(HcclDeregisterGlobalMem(handle));
    munmap(memory, BYTES);
}

TEST(test_the_program_may_forbid_it)
{
    char *memory = own_memory();
    CHECK_OK(madvise(memory, BYTES, MADV_NOHUGEPAGE));
    write_all(memory);
    void *handle = registered(memory, BYTES);
    CHECK(holds_all(memory));
    CHECK_EQ(huge_kib(memory), 0);
    CHECK_OK(HcclDeregisterGlobalMem(handle));
    munmap(memory, BYTES);
}

typedef struct writer { _Atomic(uint64_t) *words; atomic_bool stop; uint64_t rounds; } writer;

/* Adds one to the first word of every page, over and over. */
static void *add(void *argument)
{
    writer *own = argument;
    do {
        for (size_t page = 0; page < BYTES / 4096; page++)
            atomic_fetch_add(&own->words[page * 512], 1);
        own->rounds++;
    } while (!atomic_load(&own->stop));
    return NULL;
}

TEST(test_no_write_of_another_thread_is_lost_meanwhile)
{
    char *memory = own_memory();
    memset(memory, 0, BYTES);
    writer other = {.words = (void *)memory};
    pthread_t thread;
    CHECK_OK(pthread_create(&thread, NULL, add, &other));
    void *handle = registered(memory, BYTES);
    atomic_store(&other.stop, true);
    CHECK_OK(pthread_join(thread, NULL));
    for (size_t page = 0; page < BYTES / 4096; page++)
        CHECK_EQ(atomic_load(&other.words[page * 512]), other.rounds);
    CHECK_OK(HcclDeregisterGlobalMem(handle));
    munmap(memory, BYTES);
}

int main(void)
{
    open_device(0);
    RUN(test_what_was_written_before_stays);
    RUN(test_fresh_memory_is_resident_and_zero);
    RUN(test_huge_pages_at_the_ends_stay_as_they_are);
    RUN(test_the_program_may_forbid_it);
    RUN(test_no_write_of_another_thread_is_lost_meanwhile);
    close_device(0);
    return check_done();
}
