/* Many links, many threads, more than two ranks, and too few descriptors. */
#include <sys/resource.h>
#include "hccl_pair.h"

static void many_links(uint32_t rank, int other)
{
    enum { COUNT = 512 };
    static HcclComm comms[COUNT];
    char name[32];
    int before = open_descriptors();
    for (int i = 0; i < COUNT; i++) {
        snprintf(name, sizeof name, "many-%d", i);
        comms[i] = new_one_sided(name, rank);
        CHECK_OK(prepare(comms[i], 20));
    }
    CHECK_EQ(open_descriptors(), before + COUNT);
    softnpu_counters counters;
    softnpu_get_counters(&counters);
    CHECK_EQ(counters.comms, COUNT);
    CHECK_EQ(counters.threads, 0);
    in_step(other);
    for (int i = 0; i < COUNT; i++)
        CHECK_OK(HcclCommDestroy(comms[i]));
    CHECK_EQ(open_descriptors(), before);
}

TEST(test_512_links_cost_one_descriptor_each_and_no_thread)
{
    run_pair(many_links);
}

/* ---- sixteen threads on each side, in no particular order ---- */

enum { THREADS = 16, EACH = 4 };
static uint32_t our_rank;
static pthread_barrier_t all_done;

static void *prepare_some(void *number)
{
    HcclComm comms[EACH];
    char name[32];
    CHECK_OK(aclrtSetDevice(0));
    for (uintptr_t i = 0; i < EACH; i++) {                  /* the two sides begin at opposite ends */
        uintptr_t nth = (uintptr_t)number * EACH + (our_rank ? EACH - 1 - i : i);
        snprintf(name, sizeof name, "threads-%lu", (unsigned long)nth);
        comms[i] = new_one_sided(name, our_rank);
    }
    for (uintptr_t i = 0; i < EACH; i++)
        CHECK_OK(prepare(comms[our_rank ? EACH - 1 - i : i], 60));
    pthread_barrier_wait(&all_done);
    for (int i = 0; i < EACH; i++)
        CHECK_OK(HcclCommDestroy(comms[i]));
    CHECK_OK(aclrtResetDevice(0));
    return NULL;
}

static void many_threads(uint32_t rank, int other)
{
    pthread_t threads[THREADS];
    our_rank = rank;
    pthread_barrier_init(&all_done, NULL, THREADS + 1);
    for (uintptr_t i = 0; i < THREADS; i++)
        pthread_create(&threads[i], NULL, prepare_some, (void *)i);
    in_step(other);
    pthread_barrier_wait(&all_done);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
}

TEST(test_many_threads_prepare_at_once)
{
    run_pair(many_threads);
}

/* ---- four ranks ---- */

enum { RANKS = 4, BYTES = 100000 };
static void *memory_of[RANKS];
static pthread_barrier_t all_ranks;

static const char four_ranks[] = "{\"server_list\":[{\"device\":[{\"rank_id\":\"0\"},{\"rank_id\":\"1\"}]},"
                                 "{\"device\":[{\"rank_id\":\"3\"},{\"rank_id\":\"2\"}]}]}";

static void *one_of_four(void *number)
{
    uint32_t rank = (uint32_t)(uintptr_t)number;
    char name[64];
    HcclComm comm = NULL;
    void *scratch;
    CHECK_OK(aclrtSetDevice((int32_t)rank));
    snprintf(name, sizeof name, "four-%d", getpid());
    HcclCommConfig config = named_config(name);
    CHECK_OK(HcclCommInitClusterInfoMemConfig(four_ranks, rank, &config, &comm));
    CHECK_OK(aclrtMalloc(&memory_of[rank], BYTES, ACL_MEM_MALLOC_NORMAL_ONLY));
    CHECK_OK(aclrtMalloc(&scratch, BYTES, ACL_MEM_MALLOC_NORMAL_ONLY));
    fill(memory_of[rank], BYTES, rank);
    void *handle = bind_memory(comm, COMM_MEM_TYPE_DEVICE, memory_of[rank], BYTES);
    CHECK_OK(prepare(comm, 60));
    pthread_barrier_wait(&all_ranks);
    aclrtStream stream = new_stream();
    for (uint32_t step = 1; step < RANKS; step++) {
        uint32_t peer = rank ^ step;
        HcclOneSideOpDesc desc = { scratch, memory_of[peer], BYTES, HCCL_DATA_TYPE_INT8 };
        CHECK_OK(HcclBatchGet(comm, peer, &desc, 1, stream));
        CHECK_OK(aclrtSynchronizeStream(stream));
        CHECK(holds(scratch, BYTES, peer));
        desc.remoteAddr = memory_of[rank];                  /* known, but not that peer's */
        CHECK_ERR(HcclBatchGet(comm, peer, &desc, 1, stream), HCCL_E_INTERNAL);
    }
    pthread_barrier_wait(&all_ranks);
    CHECK_OK(HcclCommDestroy(comm));
    CHECK_OK(HcclDeregisterGlobalMem(handle));
    CHECK_OK(aclrtDestroyStream(stream));
    CHECK_OK(aclrtFree(scratch));
    CHECK_OK(aclrtFree(memory_of[rank]));
    CHECK_OK(aclrtResetDevice((int32_t)rank));
    return NULL;
}

static void four(uint32_t rank, int other)
{
    pthread_t threads[RANKS];
    (void)other;
    if (rank)
        return;
    pthread_barrier_init(&all_ranks, NULL, RANKS);
    for (uintptr_t i = 0; i < RANKS; i++)
        pthread_create(&threads[i], NULL, one_of_four, (void *)i);
    for (int i = 0; i < RANKS; i++)
        pthread_join(threads[i], NULL);
}

TEST(test_four_ranks_see_each_other)
{
    run_pair(four);
}

/* ---- no descriptors left ---- */

static void limit_descriptors(rlim_t count)
{
    struct rlimit limit;
    CHECK_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
    limit.rlim_cur = count < limit.rlim_max ? count : limit.rlim_max;
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
}

/* Rank 1 has room for its own sockets, but not for the memory that rank 0 hands over. */
static void exhausted(uint32_t rank, int other)
{
    enum { COUNT = 16 };
    HcclComm comm = new_one_sided("exhausted", rank);
    void *memory, *handles[COUNT];
    CHECK_OK(aclrtMalloc(&memory, COUNT * 4096, ACL_MEM_MALLOC_NORMAL_ONLY));
    for (int i = 0; i < COUNT; i++)
        handles[i] = bind_memory(comm, COMM_MEM_TYPE_DEVICE, (char *)memory + i * 4096, 1000);
    int next = dup(0);                                      /* numbers from here on are free */
    close(next);
    for (rlim_t room = 0; rank == 1 && room < 8; room++) {
        limit_descriptors((rlim_t)next + room);
        CHECK_ERR(prepare(comm, 20), HCCL_E_SYSCALL);
        limit_descriptors(1024);
    }
    if (rank == 1)
        tell(other, "x", 1);
    struct pollfd signal = { other, POLLIN, 0 };
    HcclResult code = HCCL_E_TIMEOUT;
    while (rank == 0 && code && poll(&signal, 1, 0) == 0) { /* as often as rank 1 fails */
        code = prepare(comm, 1);
        CHECK(code == HCCL_SUCCESS || code == HCCL_E_UNAVAIL || code == HCCL_E_TIMEOUT);
    }
    if (rank == 0) {
        char token;
        hear(other, &token, 1);
    }
    CHECK_OK(prepare(comm, 20));
    in_step(other);
    CHECK_OK(HcclCommDestroy(comm));
    for (int i = 0; i < COUNT; i++)
        CHECK_OK(HcclDeregisterGlobalMem(handles[i]));
    CHECK_OK(aclrtFree(memory));
}

TEST(test_too_few_descriptors_are_an_error_that_passes)
{
    run_pair(exhausted);
}

int main(void)
{
    RUN(test_512_links_cost_one_descriptor_each_and_no_thread);
    RUN(test_many_threads_prepare_at_once);
    RUN(test_four_ranks_see_each_other);
    RUN(test_too_few_descriptors_are_an_error_that_passes);
    return check_done();
}
