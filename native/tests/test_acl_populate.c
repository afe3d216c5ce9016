/* Memory of softnpu's gets its pages before their first use: in the call or behind it, unless too little would be left. */
#include "check.h"
#include <sys/mman.h>
#include <time.h>

enum { SIZE = 64 << 20, PATIENCE_MS = 60000 };

static void *device_bytes(uint64_t size)
{
    void *memory = NULL;
    CHECK_OK(aclrtMalloc(&memory, size, ACL_MEM_MALLOC_NORMAL_ONLY));
    return memory;
}

static uint64_t threads_now(void)
{
    softnpu_counters counters;
    softnpu_get_counters(&counters);
    return counters.threads;
}

static void pause_ms(long ms)
{
    nanosleep(&(struct timespec){ .tv_nsec = ms * 1000000 }, NULL);
}

/* Kernels before 5.14 populate nothing. */
static bool kernel_populates(void)
{
    void *memory = device_bytes(1 << 20);
    CHECK_OK(softnpu_populate(memory, 1 << 20, NULL));
    bool does = softnpu_present(memory, 1 << 20) == 1 << 20;
    CHECK_OK(aclrtFree(memory));
    return does;
}

/* What the container has: a limit, and the bytes in use. */
static void say(const char *limit, const char *stat)
{
    static int fds[2] = { -1, -1 };
    char names[2][32];
    const char *texts[2] = { limit, stat };
    int before[2] = { fds[0], fds[1] };
    for (int i = 0; i < 2; i++) {
        fds[i] = memfd_create("group", MFD_CLOEXEC);
        CHECK(write(fds[i], texts[i], strlen(texts[i])) == (ssize_t)strlen(texts[i]));
        snprintf(names[i], sizeof names[i], "/proc/self/fd/%d", fds[i]);
    }
    CHECK_OK(softnpu_memory_group(names[0], names[1]));
    for (int i = 0; i < 2; i++)
        if (before[i] >= 0)
            close(before[i]);
}

TEST(test_pages_come_in_the_call)
{
    char *memory = device_bytes(SIZE);
    CHECK_EQ(softnpu_present(memory, SIZE), 0);
    memory[4096] = 7;
    CHECK_OK(softnpu_populate(memory, SIZE, NULL));
    CHECK_EQ(softnpu_present(memory, SIZE), SIZE);
    CHECK_EQ(memory[4096], 7);
    CHECK_EQ(memory[SIZE - 1], 0);
    CHECK_OK(aclrtFree(memory));
}

TEST(test_call_ends_where_it_is_told_to_stop)
{
    char *memory = device_bytes(SIZE);
    int32_t stop = 1;
    CHECK_OK(softnpu_populate(memory, SIZE, &stop));
    CHECK_EQ(softnpu_present(memory, SIZE), 0);
    CHECK_OK(aclrtFree(memory));
}

TEST(test_pages_come_behind_the_call_and_its_thread_ends)
{
    uint64_t before = threads_now();
    char *memory = device_bytes(SIZE);
    softnpu_populate_soon(memory, SIZE);
    softnpu_populate_soon(memory, SIZE);                    /* is the same */
    for (int ms = 0; softnpu_present(memory, SIZE) < SIZE && ms < PATIENCE_MS; ms++) {
        memory[ms % SIZE] = 7;                              /* what is written meanwhile stays */
        pause_ms(1);
    }
    CHECK_EQ(softnpu_present(memory, SIZE), SIZE);
    CHECK_EQ(memory[0], 7);
    for (int ms = 0; threads_now() > before && ms < PATIENCE_MS; ms++)
        pause_ms(1);
    CHECK_EQ(threads_now(), before);
    CHECK_OK(aclrtFree(memory));
}

TEST(test_memory_can_be_freed_at_any_time)
{
    uint64_t before = threads_now();
    for (int i = 0; i < 20; i++) {
        char *one = device_bytes(SIZE), *other;
        CHECK_OK(aclrtMallocHost((void **)&other, SIZE));
        softnpu_populate_soon(one, SIZE);
        softnpu_populate_soon(other, SIZE);
        pause_ms(i % 5);
        CHECK_OK(aclrtFree(one));
        CHECK_OK(aclrtFreeHost(other));
    }
    for (int ms = 0; threads_now() > before && ms < PATIENCE_MS; ms++)
        pause_ms(1);
    CHECK_EQ(threads_now(), before);
}

TEST(test_an_eighth_of_the_containers_limit_is_left)
{
    char *memory = device_bytes(SIZE);
    say("134217728\n", "cache 5\nanon 67108864\nshmem 1\n");    /* 64 MiB are left, and 16 of them are the reserve */
    CHECK_ERR(softnpu_populate(memory, SIZE, NULL), ACL_ERROR_RT_MEMORY_ALLOCATION);
    say("134217728\n", "total_rss 100663296\n");             /* 32 MiB are left: less than what is looked for in advance */
    softnpu_populate_soon(memory, SIZE);
    pause_ms(100);
    CHECK_EQ(softnpu_present(memory, SIZE), 0);
    say("max\n", "anon 1\n");                                 /* is no limit; and a pass is made again */
    for (int ms = 0; softnpu_present(memory, SIZE) < SIZE && ms < PATIENCE_MS; ms++)
        pause_ms(1);
    CHECK_EQ(softnpu_present(memory, SIZE), SIZE);
    CHECK_OK(softnpu_memory_group("", ""));
    CHECK_OK(aclrtFree(memory));
}

TEST(test_only_softnpus_memory_is_populated)
{
    static char own[8192];
    char *memory = device_bytes(SIZE);
    CHECK_ERR(softnpu_populate(own, sizeof own, NULL), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_ERR(softnpu_populate(NULL, 1, NULL), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_ERR(softnpu_populate(memory, 0, NULL), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_ERR(softnpu_populate(memory, SIZE + 1, NULL), ACL_ERROR_RT_PARAM_INVALID);
    softnpu_populate_soon(NULL, SIZE);
    softnpu_populate_soon(own, UINT64_MAX);
    CHECK_ERR(softnpu_memory_group(NULL, ""), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_OK(aclrtFree(memory));
}

int main(void)
{
    CHECK_OK(aclInit(NULL));
    CHECK_OK(aclrtSetDevice(0));
    RUN(test_only_softnpus_memory_is_populated);
    if (kernel_populates()) {
        RUN(test_pages_come_in_the_call);
        RUN(test_call_ends_where_it_is_told_to_stop);
        RUN(test_pages_come_behind_the_call_and_its_thread_ends);
        RUN(test_memory_can_be_freed_at_any_time);
        RUN(test_an_eighth_of_the_containers_limit_is_left);
    } else {
        puts("this kernel populates nothing");
    }
    CHECK_OK(aclrtResetDevice(0));
    CHECK_OK(aclFinalize());
    return check_done();
}
