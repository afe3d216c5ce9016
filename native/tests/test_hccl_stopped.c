/* A peer that is stopped in the middle of a put. When HcclCommDestroy has succeeded, no byte of the peer's lands any longer,
 * however long afterwards it continues; until then it says HCCL_E_AGAIN, and softnpu_comm_awaited says when to try again.   */
#include "hccl_pair.h"

enum { BYTES = 8 << 20, ROUNDS = 6, MOST_ROUNDS = 300 };

typedef struct side {
    HcclComm comm;
    aclrtStream stream;
    void *mine, *handle, *remote;
    pid_t peer;
} side;

static side open_side(uint32_t rank, int other, int round, bool private_memory)
{
    side s;
    char name[32];
    pid_t me = getpid();
    memset(&s, 0, sizeof s);
    snprintf(name, sizeof name, "stopped-%d", round);
    if (private_memory)
        s.mine = malloc(BYTES);
    else
        CHECK_OK(aclrtMalloc(&s.mine, BYTES, ACL_MEM_MALLOC_NORMAL_ONLY));
    memset(s.mine, 0xee, BYTES);
    s.comm = new_one_sided(name, rank);
    s.stream = new_stream();
    s.handle = bind_memory(s.comm, COMM_MEM_TYPE_DEVICE, s.mine, BYTES);
    CHECK_OK(prepare(s.comm, 20));
    tell(other, &s.mine, sizeof s.mine);
    hear(other, &s.remote, sizeof s.remote);
    tell(other, &me, sizeof me);
    hear(other, &s.peer, sizeof s.peer);
    return s;
}

static void close_side(side *s, bool private_memory)
{
    CHECK_OK(HcclDeregisterGlobalMem(s->handle));
    CHECK_OK(aclrtDestroyStream(s->stream));
    if (private_memory)
        free(s->mine);
    else
        CHECK_OK(aclrtFree(s->mine));
}

/* Without pause, until it fails. */
static aclError put_for_ever(side *s, int other)
{
    HcclOneSideOpDesc desc = { s->mine, s->remote, BYTES, HCCL_DATA_TYPE_INT8 };
    char token = 0;
    for (int round = 0;; round++) {
        CHECK_OK(HcclBatchPut(s->comm, 0, &desc, 1, s->stream));
        if (round == 1)
            tell(other, &token, 1);
        aclError code = aclrtSynchronizeStream(s->stream);
        if (code)
            return code;
    }
}

static void pause_us(long us)
{
    nanosleep(&(struct timespec){ 0, us * 1000 }, NULL);
}

/* Whether it was refused first, because the peer was caught inside of a piece. */
static bool destroy_when_let_go(side *s, int signal_number)
{
    HcclResult code = HcclCommDestroy(s->comm);
    bool caught = code == HCCL_E_AGAIN;
    CHECK_EQ(softnpu_comm_awaited(s->comm) >= 0, caught);
    if (caught) {
        struct pollfd awaited = { softnpu_comm_awaited(s->comm), POLLIN, 0 };
        HcclOneSideOpDesc desc = { s->mine, s->remote, 1, HCCL_DATA_TYPE_INT8 };
        CHECK_EQ(poll(&awaited, 1, 0), 0);
        CHECK_ERR(HcclBatchGet(s->comm, 1, &desc, 1, s->stream), HCCL_E_NOT_FOUND);   /* it is closed */
        CHECK_ERR(HcclCommDestroy(s->comm), HCCL_E_AGAIN);                            /* and the peer as it was */
        kill(s->peer, signal_number);
        CHECK_EQ(poll(&awaited, 1, 20000), 1);
        code = HcclCommDestroy(s->comm);
    }
    CHECK_OK(code);
    CHECK_ERR(HcclCommDestroy(s->comm), HCCL_E_NOT_FOUND);
    CHECK_EQ(softnpu_comm_awaited(s->comm), -1);
    return caught;
}

static void stopped(uint32_t rank, int other, bool private_memory)
{
    int caught = 0, before = open_descriptors();
    char again = 1;
    for (int round = 0; again; round++) {                   /* until it was stopped within a piece at least once */
        char token = 0;
        side s = open_side(rank, other, round, private_memory);
        if (rank == 1) {
            CHECK_EQ(put_for_ever(&s, other), ACL_ERROR_RT_SUSPECT_REMOTE_ERROR);
            CHECK_OK(HcclCommDestroy(s.comm));
            tell(other, &token, 1);
        } else {
            hear(other, &token, 1);
            pause_us(137 * (round % 50));
            kill(s.peer, SIGSTOP);
            caught += destroy_when_let_go(&s, SIGCONT);
            memset(s.mine, 0x77, BYTES);                    /* it has another use now */
            kill(s.peer, SIGCONT);
            hear(other, &token, 1);
            CHECK(all_are(s.mine, BYTES, 0x77));
        }
        close_side(&s, private_memory);
        again = round + 1 < ROUNDS || (!caught && round + 1 < MOST_ROUNDS);
        rank == 1 ? hear(other, &again, 1) : tell(other, &again, 1);
        in_step(other);
    }
    CHECK_EQ(open_descriptors(), before);
    CHECK(rank == 1 || caught > 0);
}

static void stopped_mapped(uint32_t rank, int other)
{
    stopped(rank, other, false);
}

static void stopped_private(uint32_t rank, int other)
{
    stopped(rank, other, true);
}

TEST(test_no_byte_of_a_stopped_peer_lands_after_the_destroy)
{
    run_pair(stopped_mapped);
    run_pair(stopped_private);
}

/* Stopped, and killed before it could go on. */
static void killed(uint32_t rank, int other)
{
    char token = 0;
    side s = open_side(rank, other, 0, false);
    if (rank == 1)
        put_for_ever(&s, other);
    hear(other, &token, 1);
    pause_us(2000);
    kill(s.peer, SIGSTOP);
    destroy_when_let_go(&s, SIGKILL);
    memset(s.mine, 0x77, BYTES);
    kill(s.peer, SIGKILL);
    CHECK_EQ(recv(other, &token, 1, 0), 0);                 /* the socket closes with the process */
    CHECK(all_are(s.mine, BYTES, 0x77));
    close_side(&s, false);
}

TEST(test_a_stopped_peer_lets_go_when_it_is_killed)
{
    run_mortals(killed);
}

/* A get that continues after the owner left does not succeed: what it read may have another use by now. */
static void stopped_reader(uint32_t rank, int other)
{
    char token = 0;
    side s = open_side(rank, other, 0, false);
    if (rank == 1) {
        HcclOneSideOpDesc desc = { s.mine, s.remote, BYTES, HCCL_DATA_TYPE_INT8 };
        aclError code = ACL_SUCCESS;
        for (int round = 0; !code; round++) {
            CHECK_OK(HcclBatchGet(s.comm, 0, &desc, 1, s.stream));
            if (round == 1)
                tell(other, &token, 1);
            code = aclrtSynchronizeStream(s.stream);
            if (!code)
                CHECK(all_are(s.mine, BYTES, 0xee));
        }
        CHECK_EQ(code, ACL_ERROR_RT_SUSPECT_REMOTE_ERROR);
        CHECK_OK(HcclCommDestroy(s.comm));
        tell(other, &token, 1);
    } else {
        hear(other, &token, 1);
        pause_us(1500);
        kill(s.peer, SIGSTOP);
        CHECK_OK(HcclCommDestroy(s.comm));                  /* a reader does not keep the owner */
        memset(s.mine, 0x77, BYTES);
        kill(s.peer, SIGCONT);
        hear(other, &token, 1);
    }
    close_side(&s, false);
}

TEST(test_a_stopped_reader_does_not_take_other_bytes_for_its_own)
{
    run_pair(stopped_reader);
}

/* Not waited for: everything that the communicator had is given back, and the peer finds out when it continues. */
static void abandoned(uint32_t rank, int other)
{
    int caught = 0, before = open_descriptors();
    for (int round = 0; !caught && round < 200; round++) {
        char token = 0;
        side s = open_side(rank, other, round, false);
        if (rank == 1) {
            CHECK_EQ(softnpu_comm_abandon(s.comm), -1);     /* it was not refused */
            CHECK_EQ(put_for_ever(&s, other), ACL_ERROR_RT_SUSPECT_REMOTE_ERROR);
            CHECK_OK(HcclCommDestroy(s.comm));
            tell(other, &token, 1);
            hear(other, &caught, sizeof caught);
        } else {
            hear(other, &token, 1);
            kill(s.peer, SIGSTOP);
            caught = HcclCommDestroy(s.comm) == HCCL_E_AGAIN;
            CHECK_EQ(softnpu_comm_abandon(s.comm), caught ? 0 : -1);
            CHECK_EQ(softnpu_comm_abandon(s.comm), -1);
            CHECK_ERR(HcclCommDestroy(s.comm), HCCL_E_NOT_FOUND);
            kill(s.peer, SIGCONT);
            hear(other, &token, 1);
            tell(other, &caught, sizeof caught);
        }
        close_side(&s, false);
        in_step(other);
    }
    CHECK(caught);
    CHECK_EQ(open_descriptors(), before);
}

TEST(test_a_peer_that_does_not_let_go_can_be_abandoned)
{
    run_pair(abandoned);
}

int main(void)
{
    RUN(test_no_byte_of_a_stopped_peer_lands_after_the_destroy);
    RUN(test_a_stopped_peer_lets_go_when_it_is_killed);
    RUN(test_a_peer_that_does_not_let_go_can_be_abandoned);
    RUN(test_a_stopped_reader_does_not_take_other_bytes_for_its_own);
    return check_done();
}
