/* The per-peer way: register, exchange descriptors, enable; and ExchangeMemDesc as a mailbox. */
#include "hccl_pair.h"

enum { BYTES = 1 << 20 };

typedef struct side { HcclComm comm; aclrtStream stream; void *mine, *scratch; HcclMemDesc local,
        remote; uint32_t peer; } side;

static side open_side(uint32_t rank, int other)
{
    side s;
    (void)other;
    memset(&s, 0, sizeof s);
    s.peer = 1 - rank;
    s.comm = new_one_sided("memdesc", rank);
    s.stream = new_stream();
    CHECK_OK(aclrtMalloc(&s.mine, BYTES, ACL_MEM_MALLOC_NORMAL_ONLY));
    CHECK_OK(aclrtMalloc(&s.scratch, BYTES, ACL_MEM_MALLOC_NORMAL_ONLY));
    fill(s.mine, BYTES, rank);
    CHECK_OK(HcclRegisterMem(s.comm, s.peer, COMM_MEM_TYPE_DEVICE, s.mine, BYTES, &s.local));
    return s;
}

static void close_side(side *s, int other)
{
    in_step(other);
    CHECK_OK(HcclCommDestroy(s->comm));
    CHECK_OK(aclrtDestroyStream(s->stream));
    CHECK_OK(aclrtFree(s->mine));
    CHECK_OK(aclrtFree(s->scratch));
}

static HcclResult exchange(side *s, HcclMemDesc *out, uint32_t nout, HcclMemDesc *in, uint32_t nin, uint32_t *got)
{
    HcclMemDescs local = { out, nout }, remote = { in, nin };
    return HcclExchangeMemDesc(s->comm, s->peer, &local, 20, &remote, got);
}

static void registered(uint32_t rank, int other)
{
    side s = open_side(rank, other);
    CommMem there;
    uint32_t got = 0;
    CHECK_OK(exchange(&s, &s.local, 1, &s.remote, 1, &got));
    CHECK_EQ(got, 1);
    HcclOneSideOpDesc desc = { s.scratch, s.mine, BYTES, HCCL_DATA_TYPE_INT8 };
    CHECK_ERR(HcclBatchGet(s.comm, s.peer, &desc, 1, s.stream), HCCL_E_INTERNAL);      /* told about, but not enabled */
    CHECK_OK(HcclEnableMemAccess(s.comm, &s.remote, &there));
    CHECK_EQ(there.type, COMM_MEM_TYPE_DEVICE);
    CHECK_EQ(there.size, BYTES);
    desc.remoteAddr = there.addr;
    CHECK_OK(HcclBatchGet(s.comm, s.peer, &desc, 1, s.stream));
    CHECK_OK(aclrtSynchronizeStream(s.stream));
    CHECK(holds(s.scratch, BYTES, s.peer));
    CHECK_OK(HcclDisableMemAccess(s.comm, &s.remote));
    CHECK_ERR(HcclDisableMemAccess(s.comm, &s.remote), HCCL_E_NOT_FOUND);
    CHECK_ERR(HcclBatchGet(s.comm, s.peer, &desc, 1, s.stream), HCCL_E_INTERNAL);
    in_step(other);
    CHECK_OK(HcclDeregisterMem(s.comm, &s.local));
    CHECK_ERR(HcclDeregisterMem(s.comm, &s.local), HCCL_E_NOT_FOUND);
    close_side(&s, other);
}

TEST(test_register_exchange_enable)
{
    run_pair(registered);
}

static void forged(uint32_t rank, int other)
{
    side s = open_side(rank, other);
    CommMem there;
    uint32_t got = 0, codes[HCCL_E_OOM + 1] = { 0 };
    CHECK_OK(exchange(&s, &s.local, 1, &s.remote, 1, &got));
    CHECK_ERR(HcclEnableMemAccess(s.comm, &s.local, &there), HCCL_E_PARA);             /* our own */
    CHECK_ERR(HcclDeregisterMem(s.comm, &s.remote), HCCL_E_PARA);                      /* not our own */
    for (size_t at = 0; at < 44; at++)                      /* every byte that means something */
        for (int bit = 0; bit < 8; bit++) {
            HcclMemDesc desc = s.remote;
            desc.desc[at] ^= (char)(1 << bit);
            HcclResult code = HcclEnableMemAccess(s.comm, &desc, &there);
            CHECK(code == HCCL_E_PARA || code == HCCL_E_NOT_FOUND);
            codes[code]++;
        }
    CHECK(codes[HCCL_E_PARA] > 0 && codes[HCCL_E_NOT_FOUND] > 0);
    close_side(&s, other);
}

TEST(test_a_forged_descriptor_enables_nothing)
{
    run_pair(forged);
}

/* A different number each way, more than one message full, and nothing but text inside. */
static void mailbox(uint32_t rank, int other)
{
    enum { MOST = 100 };
    side s = open_side(rank, other);
    static HcclMemDesc out[MOST], in[MOST];
    uint32_t counts[2] = { MOST, 3 }, got = 0;
    for (uint32_t round = 0; round < 3; round++) {
        memset(in, 0, sizeof in);
        for (uint32_t i = 0; i < counts[rank]; i++)
            snprintf(out[i].desc, sizeof out[i].desc, "{\"round\": %u, \"rank\": %u, \"item\": %u}", round, rank, i);
        CHECK_OK(exchange(&s, out, counts[rank], in, MOST, &got));
        CHECK_EQ(got, counts[1 - rank]);
        for (uint32_t i = 0; i < got; i++) {
            char want[128];
            snprintf(want, sizeof want, "{\"round\": %u, \"rank\": %u, \"item\": %u}", round, 1 - rank, i);
            CHECK(!strcmp(in[i].desc, want));
        }
    }
    CHECK_OK(exchange(&s, NULL, 0, NULL, 0, &got));
    CHECK_EQ(got, 0);
    close_side(&s, other);
}

TEST(test_a_mailbox)
{
    run_pair(mailbox);
}

static void no_room(uint32_t rank, int other)
{
    side s = open_side(rank, other);
    HcclMemDesc out[2] = { { "a" }, { "b" } }, in[2];
    uint32_t got = 77;
    CHECK_ERR(exchange(&s, out, 2, in, 1 + rank, &got), HCCL_E_PARA);
    CHECK_EQ(got, 77);
    in_step(other);
    CHECK_OK(exchange(&s, out, 2, in, 2, &got));            /* over a new link */
    CHECK_EQ(got, 2);
    close_side(&s, other);
}

TEST(test_more_descriptors_than_room)
{
    run_pair(no_room);
}

static void no_answer(uint32_t rank, int other)
{
    side s = open_side(rank, other);
    HcclMemDescs none = { NULL, 0 };
    uint32_t got;
    if (rank == 0)
        CHECK_ERR(HcclExchangeMemDesc(s.comm, s.peer, &none, 1, &none, &got), HCCL_E_TIMEOUT);
    in_step(other);
    CHECK_OK(exchange(&s, NULL, 0, NULL, 0, &got));
    in_step(other);
    if (rank == 0)                                          /* linked now, and again the peer does not answer */
        CHECK_ERR(HcclExchangeMemDesc(s.comm, s.peer, &none, 1, &none, &got), HCCL_E_TIMEOUT);
    in_step(other);
    CHECK_OK(exchange(&s, NULL, 0, NULL, 0, &got));
    close_side(&s, other);
}

TEST(test_a_late_answer_is_not_taken_for_a_new_one)
{
    run_pair(no_answer);
}

static void other_call(uint32_t rank, int other)
{
    side s = open_side(rank, other);
    uint32_t got;
    HcclResult code = rank == 0 ? prepare(s.comm, 20) : exchange(&s, NULL, 0, NULL, 0, &got);
    CHECK(code == HCCL_E_INTERNAL || code == HCCL_E_UNAVAIL);
    in_step(other);
    CHECK_OK(prepare(s.comm, 20));
    close_side(&s, other);
}

TEST(test_two_different_calls_do_not_match)
{
    run_pair(other_call);
}

static void both_ways(uint32_t rank, int other)
{
    side s = open_side(rank, other);
    void *bound, *theirs;
    CHECK_OK(aclrtMalloc(&bound, BYTES, ACL_MEM_MALLOC_NORMAL_ONLY));
    fill(bound, BYTES, 50 + rank);
    void *handle = bind_memory(s.comm, COMM_MEM_TYPE_DEVICE, bound, BYTES);
    uint32_t got = 0;
    CommMem there;
    CHECK_OK(prepare(s.comm, 20));
    CHECK_OK(exchange(&s, &s.local, 1, &s.remote, 1, &got));                           /* over the same link */
    CHECK_OK(HcclEnableMemAccess(s.comm, &s.remote, &there));
    tell(other, &bound, sizeof bound);
    hear(other, &theirs, sizeof theirs);
    HcclOneSideOpDesc items[2] = { { s.scratch, there.addr, BYTES / 2, HCCL_DATA_TYPE_INT8 },
            { (char *)s.scratch + BYTES / 2, theirs, BYTES / 2, HCCL_DATA_TYPE_INT8 } };
    CHECK_OK(HcclBatchGet(s.comm, s.peer, items, 2, s.stream));
    CHECK_OK(aclrtSynchronizeStream(s.stream));
    CHECK(holds(s.scratch, BYTES / 2, s.peer) && holds((char *)s.scratch + BYTES / 2, BYTES / 2, 50 + s.peer));
    in_step(other);
    close_side(&s, other);
    CHECK_OK(HcclDeregisterGlobalMem(handle));
    CHECK_OK(aclrtFree(bound));
}

TEST(test_both_ways_on_one_communicator)
{
    run_pair(both_ways);
}

int main(void)
{
    RUN(test_register_exchange_enable);
    RUN(test_a_forged_descriptor_enables_nothing);
    RUN(test_a_mailbox);
    RUN(test_more_descriptors_than_room);
    RUN(test_a_late_answer_is_not_taken_for_a_new_one);
    RUN(test_two_different_calls_do_not_match);
    RUN(test_both_ways_on_one_communicator);
    return check_done();
}
