/* The ways to make a communicator that meets its peers at once. */
#include "hccl_pair.h"

static void exchange_rank(HcclComm comm, uint32_t rank, uint32_t peer)
{
    aclrtStream stream = new_stream();
    void *buffer;
    CHECK_OK(aclrtMalloc(&buffer, 64, ACL_MEM_MALLOC_NORMAL_ONLY));
    uint32_t *words = buffer;
    words[0] = rank + 100;
    words[1] = 0;
    HcclSendRecvItem items[] = { { HCCL_SEND, words, 1, HCCL_DATA_TYPE_UINT32, peer }, { HCCL_RECV, words + 1, 1,
            HCCL_DATA_TYPE_UINT32, peer } };
    CHECK_OK(HcclBatchSendRecv(items, 2, comm, stream));
    CHECK_OK(HcclBarrier(comm, stream));
    CHECK_OK(aclrtSynchronizeStream(stream));
    CHECK_EQ(words[1], peer + 100);
    CHECK_OK(aclrtFree(buffer));
    CHECK_OK(aclrtDestroyStream(stream));
}

static void root_info(uint32_t rank, int other)
{
    HcclComm comm = new_two_sided(rank, other);
    char name[128], theirs[128];
    CHECK_OK(HcclGetCommName(comm, name));
    exchange_rank(comm, rank, 1 - rank);
    tell(other, name, sizeof name);
    hear(other, theirs, sizeof theirs);
    CHECK(strlen(name) > 0 && !strcmp(name, theirs));
    in_step(other);
    CHECK_OK(HcclCommDestroy(comm));
}

TEST(test_root_info)
{
    run_pair(root_info);
}

static void configured(uint32_t rank, int other)
{
    HcclRootInfo info;
    HcclComm comm = NULL;
    char name[128];
    HcclCommConfig config = named_config("a name"), wrong = config;
    wrong.reserved[9] ^= 1;
    if (rank == 0) {
        CHECK_OK(HcclGetRootInfo(&info));
        tell(other, &info, sizeof info);
    } else {
        hear(other, &info, sizeof info);
    }
    CHECK_ERR(HcclCommInitRootInfoConfig(2, &info, rank, &wrong, &comm), HCCL_E_PARA);
    CHECK_OK(HcclCommInitRootInfoConfig(2, &info, rank, &config, &comm));
    CHECK_OK(HcclGetCommName(comm, name));
    CHECK(!strcmp(name, "a name"));
    exchange_rank(comm, rank, 1 - rank);
    in_step(other);
    CHECK_OK(HcclCommDestroy(comm));
}

TEST(test_root_info_with_configuration)
{
    run_pair(configured);
}

static void disagreement(uint32_t rank, int other)
{
    HcclRootInfo info;
    HcclComm comm = NULL;
    if (rank == 0) {
        CHECK_OK(HcclGetRootInfo(&info));
        tell(other, &info, sizeof info);
    } else {
        hear(other, &info, sizeof info);
    }
    CHECK_ERR(HcclCommInitRootInfo(2 + rank, &info, rank, &comm), HCCL_E_PARA);
    CHECK(comm == NULL);
}

TEST(test_ranks_that_disagree_about_their_number)
{
    run_pair(disagreement);
}

static void alone(uint32_t rank, int other)
{
    HcclRootInfo info;
    HcclComm comm = NULL;
    (void)other;
    setenv("HCCL_CONNECT_TIMEOUT", "1", 1);
    CHECK_OK(HcclGetRootInfo(&info));
    CHECK_ERR(HcclCommInitRootInfo(2, &info, rank, &comm), HCCL_E_TIMEOUT);     /* each has a root info of its own */
    CHECK_OK(HcclCommInitRootInfo(1, &info, 0, &comm));                         /* no rank to wait for */
    CHECK_OK(HcclCommDestroy(comm));
}

TEST(test_no_rank_comes)
{
    run_pair(alone);
}

static void cluster_file(uint32_t rank, int other)
{
    char path[64];
    HcclComm comm = NULL, named = NULL;
    HcclCommConfig config = named_config("from a file");
    snprintf(path, sizeof path, "/tmp/test-hccl-%d-%u.json", getpid(), rank);
    CHECK_ERR(HcclCommInitClusterInfo(path, rank, &comm), HCCL_E_OPEN_FILE_FAILURE);
    CHECK_ERR(HcclCommInitClusterInfo("/tmp", rank, &comm), HCCL_E_PARA);
    FILE *file = fopen(path, "w");
    /* the same table, spaced differently by each rank; unlike that of another run */
    for (const char *at = two_ranks; *at; at++)
        fprintf(file, *at == '{' && rank ? "%c\n" : "%c", *at);
    fseek(file, -1, SEEK_CUR);
    fprintf(file, ",\"run\":\"%d\"}", getppid());
    fclose(file);
    CHECK_ERR(HcclCommInitClusterInfo(path, 2, &comm), HCCL_E_PARA);
    CHECK_OK(HcclCommInitClusterInfo(path, rank, &comm));
    CHECK_OK(HcclCommInitClusterInfoConfig(path, rank, &config, &named));
    exchange_rank(comm, rank, 1 - rank);
    exchange_rank(named, rank, 1 - rank);
    in_step(other);
    CHECK_OK(HcclCommDestroy(named));
    CHECK_OK(HcclCommDestroy(comm));
    unlink(path);
}

TEST(test_cluster_info_from_a_file)
{
    run_pair(cluster_file);
}

/* ---- four ranks in one process ---- */

enum { RANKS = 4 };
static HcclComm comms[RANKS];
static HcclRootInfo shared_info;

static void *one_of_four(void *argument)
{
    uint32_t rank = (uint32_t)(uintptr_t)argument;
    CHECK_OK(aclrtSetDevice((int32_t)rank));
    CHECK_OK(HcclCommInitRootInfo(RANKS, &shared_info, rank, &comms[rank]));
    for (uint32_t step = 1; step < RANKS; step++)
        exchange_rank(comms[rank], rank, rank ^ step);
    return NULL;
}

static void four_threads(uint32_t rank, int other)
{
    pthread_t threads[RANKS];
    (void)other;
    if (rank)
        return;
    CHECK_OK(HcclGetRootInfo(&shared_info));
    for (uintptr_t i = 0; i < RANKS; i++)
        pthread_create(&threads[i], NULL, one_of_four, (void *)i);
    for (int i = 0; i < RANKS; i++)
        pthread_join(threads[i], NULL);
    for (int i = 0; i < RANKS; i++) {
        CHECK_OK(HcclCommDestroy(comms[i]));
        CHECK_OK(aclrtResetDevice(i));
    }
}

TEST(test_four_ranks_in_four_threads)
{
    run_pair(four_threads);
}

static void *buffers[RANKS];
static aclrtStream streams[RANKS];

/* Round the circle: every rank hands on what it received. All are submitted by one thread, which must not wait in between. */
static void submit_circle(const int32_t *devices)
{
    for (uint32_t i = 0; i < RANKS; i++) {
        CHECK_OK(aclrtSetDevice(devices[i]));
        if (i > 0)
            CHECK_OK(HcclRecv(buffers[i], 1024, HCCL_DATA_TYPE_INT8, i - 1, comms[i], streams[i]));
        if (i < RANKS - 1)
            CHECK_OK(HcclSend(buffers[i], 1024, HCCL_DATA_TYPE_INT8, i + 1, comms[i], streams[i]));
        CHECK_OK(HcclBarrier(comms[i], streams[i]));
        CHECK_OK(aclrtResetDevice(devices[i]));
    }
}

static void init_all(uint32_t rank, int other)
{
    int32_t devices[RANKS] = { 3, 1, 0, 2 };
    uint32_t number;
    (void)other;
    if (rank)
        return;
    int before = open_descriptors();
    CHECK_OK(HcclCommInitAll(RANKS, devices, comms));
    for (uint32_t i = 0; i < RANKS; i++) {
        CHECK_OK(aclrtSetDevice(devices[i]));
        CHECK_OK(HcclGetRankId(comms[i], &number));
        CHECK_EQ(number, i);
        streams[i] = new_stream();
        CHECK_OK(aclrtMalloc(&buffers[i], 4096, ACL_MEM_MALLOC_NORMAL_ONLY));
    }
    fill(buffers[0], 1024, 5);
    submit_circle(devices);
    for (uint32_t i = 0; i < RANKS; i++) {
        CHECK_OK(aclrtSetDevice(devices[i]));
        CHECK_OK(aclrtSynchronizeStream(streams[i]));
        CHECK(holds(buffers[i], 1024, 5));
    }
    for (uint32_t i = 0; i < RANKS; i++) {
        CHECK_OK(aclrtSetDevice(devices[i]));
        CHECK_OK(aclrtDestroyStream(streams[i]));
        CHECK_OK(aclrtFree(buffers[i]));
        CHECK_OK(HcclCommDestroy(comms[i]));
        for (int times = 0; times < 3; times++)             /* as often as set, apart from the circle */
            CHECK_OK(aclrtResetDevice(devices[i]));
    }
    CHECK_EQ(open_descriptors(), before);
    CHECK_OK(aclrtSetDevice(0));                            /* open_device's own */
}

TEST(test_one_process_with_four_devices)
{
    run_pair(init_all);
}

int main(void)
{
    RUN(test_root_info);
    RUN(test_root_info_with_configuration);
    RUN(test_ranks_that_disagree_about_their_number);
    RUN(test_no_rank_comes);
    RUN(test_cluster_info_from_a_file);
    RUN(test_four_ranks_in_four_threads);
    RUN(test_one_process_with_four_devices);
    return check_done();
}
