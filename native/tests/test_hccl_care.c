/* Large memory is looked after behind the calls: a peer's existing pages get into this process's tables, and none is made; the
 * caller's memory gets huge pages where all of it is there. */
#include <sys/mman.h>
#include <time.h>
#include "hccl_pair.h"

enum { PATIENCE_MS = 60000 };
static const uint64_t size = (uint64_t)512 << 20, there = (uint64_t)48 << 20;
#define HUGE_PAGE ((uint64_t)2 << 20)

static void pause_ms(long ms)
{
    nanosleep(&(struct timespec){ .tv_nsec = ms * 1000000 }, NULL);
}

static uint64_t threads_now(void)
{
    softnpu_counters counters;
    softnpu_get_counters(&counters);
    return counters.threads;
}

static long kib_of(const char *file, const char *format)
{
    char line[256];
    long kib = -1, sum = 0;
    FILE *lines = fopen(file, "r");
    while (lines && fgets(line, sizeof line, lines))
        if (sscanf(line, format, &kib) == 1)
            sum += kib;
    if (lines)
        fclose(lines);
    return sum;
}

static long shared_kib(void)
{
    return kib_of("/proc/self/status", "RssShmem: %ld kB");
}

static void existing_pages(uint32_t rank, int other)
{
    uint64_t before = threads_now();
    HcclComm comm = new_one_sided("care", rank);
    char *device;
    CHECK_OK(aclrtMalloc((void **)&device, size, ACL_MEM_MALLOC_NORMAL_ONLY));
    memset(device, 1, there);
    void *handle = bind_memory(comm, COMM_MEM_TYPE_DEVICE, device, size);
    long own = shared_kib(), wanted = own + (long)(there >> 10);
    CHECK_OK(prepare(comm, 20));
    for (int ms = 0; shared_kib() < wanted && ms < PATIENCE_MS; ms++)
        pause_ms(1);
    CHECK(shared_kib() >= wanted);
    memset(device + there, 1, there);                       /* later pages are found, too */
    wanted += 2 * (long)(there >> 10);
    for (int ms = 0; shared_kib() < wanted && ms < PATIENCE_MS; ms++)
        pause_ms(1);
    CHECK(shared_kib() >= wanted);
    in_step(other);
    CHECK_EQ(softnpu_present(device, size), 2 * there);     /* and no page was made to which no process wrote */
    in_step(other);
    CHECK_OK(HcclCommDestroy(comm));
    CHECK_OK(HcclDeregisterGlobalMem(handle));
    CHECK_OK(aclrtFree(device));
    CHECK_EQ(threads_now(), before);
}

TEST(test_pages_of_a_peer_that_exist_are_mapped)
{
    run_pair(existing_pages);
}

static void unlinked_at_any_time(uint32_t rank, int other)
{
    char *device;
    CHECK_OK(aclrtMalloc((void **)&device, size, ACL_MEM_MALLOC_NORMAL_ONLY));
    memset(device, 1, there);
    for (int i = 0; i < 5; i++) {
        HcclComm comm = new_one_sided("brief", rank);
        void *handle = bind_memory(comm, COMM_MEM_TYPE_DEVICE, device, size);
        CHECK_OK(prepare(comm, 20));
        pause_ms(2 * i);
        in_step(other);
        CHECK_OK(HcclCommDestroy(comm));
        CHECK_OK(HcclDeregisterGlobalMem(handle));
    }
    CHECK_OK(aclrtFree(device));
}

TEST(test_a_peers_memory_can_be_unmapped_at_any_time)
{
    run_pair(unlinked_at_any_time);
}

static void *registered(char *memory, uint64_t bytes)
{
    void *handle = NULL;
    CommMem mem = { COMM_MEM_TYPE_DEVICE, memory, bytes };
    CHECK_OK(HcclRegisterGlobalMem(&mem, &handle));
    return handle;
}

static long huge_kib(void)
{
    return kib_of("/proc/self/smaps", "AnonHugePages: %ld kB");
}

static char *own_memory(uint64_t bytes, uint64_t touched)
{
    char *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    memset(memory, 7, touched);
    return memory;
}

static bool kernel_has_huge_pages(void)
{
    char *memory = own_memory(2 * HUGE_PAGE, 2 * HUGE_PAGE);
    long before = huge_kib();
    void *handle = registered(memory, 2 * HUGE_PAGE);
    bool has = huge_kib() > before;
    CHECK_OK(HcclDeregisterGlobalMem(handle));
    munmap(memory, 2 * HUGE_PAGE);
    if (!has)
        puts("no huge pages here: only contents are compared");
    return has;
}

static void large_memory(uint32_t rank, int other)
{
    (void)rank, (void)other;
    bool has = kernel_has_huge_pages();
    char *memory = own_memory(size, there);
    long before = huge_kib(), most = (long)(there >> 10), least = most - (long)(2 * HUGE_PAGE >> 10);
    void *handle = registered(memory, size);
    for (int ms = 0; has && huge_kib() < before + least && ms < PATIENCE_MS; ms++) {
        memory[ms] = 8;                                     /* what is written meanwhile stays */
        pause_ms(1);
    }
    CHECK(!has || huge_kib() >= before + least);
    pause_ms(50);
    CHECK(huge_kib() <= before + most);                     /* memory that was not written to has no pages so far */
    CHECK_OK(HcclDeregisterGlobalMem(handle));
    CHECK(all_are(memory + PATIENCE_MS, there - PATIENCE_MS, 7));
    CHECK(all_are(memory + there, size - there, 0));
    munmap(memory, size);
    for (int i = 0; i < 5; i++) {                           /* deregistered, and unmapped, at any time */
        memory = own_memory(size, there);
        handle = registered(memory, size);
        pause_ms(i);
        CHECK_OK(HcclDeregisterGlobalMem(handle));
        munmap(memory, size);
    }
}

TEST(test_large_memory_of_the_caller_gets_huge_pages)
{
    run_pair(large_memory);
}

int main(void)
{
    RUN(test_pages_of_a_peer_that_exist_are_mapped);
    RUN(test_a_peers_memory_can_be_unmapped_at_any_time);
    RUN(test_large_memory_of_the_caller_gets_huge_pages);
    return check_done();
}
