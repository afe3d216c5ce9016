/* A peer that is killed, or that destroys its communicator: the survivor's call or task ends with an error, soon. */
#include <sys/mman.h>
#include "hccl_pair.h"

enum { BYTES = 8 << 20 };

typedef struct side {
    HcclComm comm;
    aclrtStream stream;
    void *mine, *handle;
    void *remote;
} side;

/* private_memory: the peer's is reached with process_vm_readv, else it is mapped */
static side open_side(uint32_t rank, int other, bool private_memory)
{
    side s;
    memset(&s, 0, sizeof s);
    if (private_memory)
        s.mine = malloc(BYTES);
    else
        CHECK_OK(aclrtMalloc(&s.mine, BYTES, ACL_MEM_MALLOC_NORMAL_ONLY));
    memset(s.mine, (int)rank, BYTES);
    s.comm = new_one_sided("death", rank);
    s.stream = new_stream();
    s.handle = bind_memory(s.comm, COMM_MEM_TYPE_DEVICE, s.mine, BYTES);
    CHECK_OK(prepare(s.comm, 20));
    tell(other, &s.mine, sizeof s.mine);
    hear(other, &s.remote, sizeof s.remote);
    return s;
}

static void close_side(side *s, bool private_memory)
{
    CHECK_OK(HcclCommDestroy(s->comm));
    CHECK_OK(HcclDeregisterGlobalMem(s->handle));
    CHECK_OK(aclrtDestroyStream(s->stream));
    if (private_memory)
        free(s->mine);
    else
        CHECK_OK(aclrtFree(s->mine));
}

static HcclResult get(side *s, uint64_t bytes)
{
    HcclOneSideOpDesc desc = { s->mine, s->remote, bytes, HCCL_DATA_TYPE_INT8 };
    return HcclBatchGet(s->comm, 1, &desc, 1, s->stream);
}

static HcclResult put(side *s, uint64_t bytes)
{
    HcclOneSideOpDesc desc = { s->mine, s->remote, bytes, HCCL_DATA_TYPE_INT8 };
    return HcclBatchPut(s->comm, 1, &desc, 1, s->stream);
}

static void await_death(int other)
{
    char token;
    CHECK_EQ(recv(other, &token, 1, 0), 0);                 /* the socket closes with the process */
}

static void killed_before(uint32_t rank, int other, bool private_memory)
{
    side s = open_side(rank, other, private_memory);
    in_step(other);
    if (rank == 1)
        raise(SIGKILL);
    await_death(other);
    CHECK_OK(get(&s, BYTES));                               /* accepted: only the task finds out */
    CHECK_ERR(aclrtSynchronizeStream(s.stream), ACL_ERROR_RT_SUSPECT_REMOTE_ERROR);
    CHECK_OK(put(&s, 1));
    CHECK_ERR(aclrtSynchronizeStream(s.stream), ACL_ERROR_RT_SUSPECT_REMOTE_ERROR);
    HcclResult error = HCCL_SUCCESS;
    CHECK_OK(HcclGetCommAsyncError(s.comm, &error));
    CHECK_EQ(error, HCCL_E_REMOTE);
    close_side(&s, private_memory);
}

static void killed_before_mapped(uint32_t rank, int other)
{
    killed_before(rank, other, false);
}

static void killed_before_private(uint32_t rank, int other)
{
    killed_before(rank, other, true);
}

TEST(test_peer_killed_before_a_transfer)
{
    run_mortals(killed_before_mapped);
    run_mortals(killed_before_private);
}

/* The survivor moves without pause; the other dies at some moment of it. */
static void killed_during(uint32_t rank, int other, bool private_memory, HcclResult (*move)(side *, uint64_t))
{
    side s = open_side(rank, other, private_memory);
    char token = 0;
    if (rank == 1) {
        hear(other, &token, 1);
        raise(SIGKILL);
    }
    aclError code = ACL_SUCCESS;
    double start = 0;
    for (int round = 0; !code && round < 100000; round++) {
        CHECK_OK(move(&s, BYTES));
        if (round == 1) {
            tell(other, &token, 1);
            start = seconds_now();
        }
        code = aclrtSynchronizeStream(s.stream);
    }
    CHECK_EQ(code, ACL_ERROR_RT_SUSPECT_REMOTE_ERROR);
    CHECK(seconds_now() - start < 10);
    close_side(&s, private_memory);
}

static void killed_during_get(uint32_t rank, int other)
{
    killed_during(rank, other, false, get);
}

static void killed_during_private_get(uint32_t rank, int other)
{
    killed_during(rank, other, true, get);
}

static void killed_during_private_put(uint32_t rank, int other)
{
    killed_during(rank, other, true, put);
}

TEST(test_peer_killed_during_a_transfer)
{
    for (int i = 0; i < 3; i++) {
        run_mortals(killed_during_get);
        run_mortals(killed_during_private_get);
        run_mortals(killed_during_private_put);
    }
}

static void destroyed(uint32_t rank, int other)
{
    side s = open_side(rank, other, true);
    in_step(other);
    if (rank == 0) {
        in_step(other);                                     /* the other has destroyed its communicator */
        memset(s.mine, 7, BYTES);
        CHECK_OK(put(&s, BYTES));
        CHECK_ERR(aclrtSynchronizeStream(s.stream), ACL_ERROR_RT_SUSPECT_REMOTE_ERROR);
        in_step(other);
        close_side(&s, true);
        return;
    }
    CHECK_OK(HcclCommDestroy(s.comm));
    in_step(other);
    in_step(other);
    CHECK(all_are(s.mine, BYTES, 1));                       /* nothing was written into what is no longer offered */
    CHECK_OK(HcclDeregisterGlobalMem(s.handle));
    CHECK_OK(aclrtDestroyStream(s.stream));
    free(s.mine);
}

TEST(test_peer_that_destroyed_its_communicator)
{
    run_pair(destroyed);
}

static void unmapped(uint32_t rank, int other)
{
    void *mine = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), *remote;
    HcclComm comm = new_one_sided("unmapped", rank);
    aclrtStream stream = new_stream();
    void *handle = bind_memory(comm, COMM_MEM_TYPE_HOST, mine, BYTES);
    CHECK_OK(prepare(comm, 20));
    tell(other, &mine, sizeof mine);
    hear(other, &remote, sizeof remote);
    if (rank == 1)
        CHECK_EQ(munmap((char *)mine + BYTES / 2, BYTES / 2), 0);
    in_step(other);
    if (rank == 0) {
        HcclOneSideOpDesc desc = { mine, remote, BYTES, HCCL_DATA_TYPE_INT8 };
        CHECK_OK(HcclBatchGet(comm, 1, &desc, 1, stream));
        CHECK_ERR(aclrtSynchronizeStream(stream), ACL_ERROR_RT_SUSPECT_REMOTE_ERROR);
        desc.count = BYTES / 2;                             /* the rest is still there, and so is the link */
        CHECK_OK(HcclBatchGet(comm, 1, &desc, 1, stream));
        CHECK_OK(aclrtSynchronizeStream(stream));
    }
    in_step(other);
    CHECK_OK(HcclCommDestroy(comm));
    CHECK_OK(HcclDeregisterGlobalMem(handle));
    CHECK_OK(aclrtDestroyStream(stream));
    munmap(mine, BYTES);
}

TEST(test_peer_that_unmapped_its_memory)
{
    run_pair(unmapped);
}

static void killed_in_receive(uint32_t rank, int other)
{
    HcclComm comm = new_two_sided(rank, other);
    aclrtStream stream = new_stream();
    void *buffer;
    CHECK_OK(aclrtMalloc(&buffer, BYTES, ACL_MEM_MALLOC_NORMAL_ONLY));
    in_step(other);
    if (rank == 1) {
        char token;
        hear(other, &token, 1);
        raise(SIGKILL);
    }
    CHECK_OK(HcclRecv(buffer, BYTES, HCCL_DATA_TYPE_INT8, 1, comm, stream));
    CHECK_OK(HcclBarrier(comm, stream));
    tell(other, "x", 1);
    CHECK_ERR(aclrtSynchronizeStream(stream), ACL_ERROR_RT_SUSPECT_REMOTE_ERROR);
    CHECK_OK(HcclSend(buffer, BYTES, HCCL_DATA_TYPE_INT8, 1, comm, stream));
    CHECK_ERR(aclrtSynchronizeStream(stream), ACL_ERROR_RT_SUSPECT_REMOTE_ERROR);
    CHECK_OK(HcclCommDestroy(comm));
    CHECK_OK(aclrtDestroyStream(stream));
    CHECK_OK(aclrtFree(buffer));
}

TEST(test_peer_killed_while_we_receive)
{
    run_mortals(killed_in_receive);
}

/* Killed at an arbitrary moment of setting up: an error or success, never a hang or a crash. */
static void killed_in_prepare(uint32_t rank, int other)
{
    HcclComm comm = new_one_sided("killed in prepare", rank);
    void *mine;
    CHECK_OK(aclrtMalloc(&mine, BYTES, ACL_MEM_MALLOC_NORMAL_ONLY));
    void *handle = bind_memory(comm, COMM_MEM_TYPE_DEVICE, mine, BYTES);
    if (rank == 1) {
        char token;
        pid_t us = getpid();                                /* not getppid() in the helper: it may have been orphaned by then */
        if (fork() == 0) {                                  /* a helper that kills us when rank 0 says so */
            hear(other, &token, 1);
            kill(us, SIGKILL);
            _exit(0);
        }
        close(other);
        prepare(comm, 20);
        pause();
    }
    tell(other, "x", 1);
    HcclResult code = prepare(comm, 1);
    CHECK(code == HCCL_SUCCESS || code == HCCL_E_UNAVAIL || code == HCCL_E_TIMEOUT);
    CHECK_OK(HcclCommDestroy(comm));
    CHECK_OK(HcclDeregisterGlobalMem(handle));
    CHECK_OK(aclrtFree(mine));
}

TEST(test_peer_killed_during_prepare)
{
    for (int i = 0; i < 3; i++)
        run_mortals(killed_in_prepare);
}

int main(void)
{
    RUN(test_peer_killed_before_a_transfer);
    RUN(test_peer_killed_during_a_transfer);
    RUN(test_peer_that_destroyed_its_communicator);
    RUN(test_peer_that_unmapped_its_memory);
    RUN(test_peer_killed_while_we_receive);
    RUN(test_peer_killed_during_prepare);
    return check_done();
}
