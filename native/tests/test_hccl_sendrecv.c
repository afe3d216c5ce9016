/* Two-sided transfers: pairs, order, sizes, barriers, aborts. */
#include "hccl_pair.h"

enum { BYTES = (4 << 20) + 13 };

typedef struct side {
    uint32_t rank, peer;
    int other;
    HcclComm comm;
    aclrtStream stream;
    uint8_t *a, *b;
} side;

static side open_side(uint32_t rank, int other)
{
    side s = { rank, 1 - rank, other, new_two_sided(rank, other), new_stream(), NULL, NULL };
    void *a, *b;
    CHECK_OK(aclrtMalloc(&a, BYTES, ACL_MEM_MALLOC_NORMAL_ONLY));
    CHECK_OK(aclrtMalloc(&b, BYTES, ACL_MEM_MALLOC_NORMAL_ONLY));
    s.a = a;
    s.b = b;
    fill(a, BYTES, rank);
    memset(b, 0, BYTES);
    return s;
}

static void close_side(side *s)
{
    in_step(s->other);
    CHECK_OK(HcclCommDestroy(s->comm));
    CHECK_OK(aclrtDestroyStream(s->stream));
    CHECK_OK(aclrtFree(s->a));
    CHECK_OK(aclrtFree(s->b));
}

static HcclResult send_bytes(side *s, void *from, uint64_t count)
{
    return HcclSend(from, count, HCCL_DATA_TYPE_INT8, s->peer, s->comm, s->stream);
}

static HcclResult recv_bytes(side *s, void *to, uint64_t count)
{
    return HcclRecv(to, count, HCCL_DATA_TYPE_INT8, s->peer, s->comm, s->stream);
}

static aclrtStreamStatus status_of(aclrtStream stream)
{
    aclrtStreamStatus status = ACL_STREAM_STATUS_COMPLETE;
    aclrtStreamQuery(stream, &status);
    return status;
}

static void there_and_back(uint32_t rank, int other)
{
    side s = open_side(rank, other);
    if (rank == 0) {
        CHECK_OK(send_bytes(&s, s.a, BYTES));
        CHECK_OK(recv_bytes(&s, s.b, BYTES));
    } else {
        CHECK_OK(recv_bytes(&s, s.b, BYTES));
        CHECK_OK(send_bytes(&s, s.a, BYTES));
    }
    CHECK_OK(aclrtSynchronizeStream(s.stream));
    CHECK(holds(s.b, BYTES, 1 - rank));
    close_side(&s);
}

TEST(test_bytes_there_and_back)
{
    run_pair(there_and_back);
}

static void in_order(uint32_t rank, int other)
{
    enum { COUNT = 200 };
    side s = open_side(rank, other);
    for (uint32_t i = 0; i < COUNT; i++) {                  /* sizes 0, 3, 6 ...: a mixed-up pair would fail */
        uint64_t bytes = i * 3;
        if (rank == 0)
            CHECK_OK(send_bytes(&s, s.a + i * 1000, bytes));
        else
            CHECK_OK(recv_bytes(&s, s.b + i * 1000, bytes));
    }
    CHECK_OK(aclrtSynchronizeStream(s.stream));
    for (uint32_t i = 0; rank == 1 && i < COUNT; i++)
        for (uint64_t at = 0; at < 1000; at++)
            CHECK_EQ(s.b[i * 1000 + at], at < i * 3 ? pattern(0, i * 1000 + at) : 0);
    close_side(&s);
}

TEST(test_pairs_keep_their_order)
{
    run_pair(in_order);
}

static void send_waits(uint32_t rank, int other)
{
    side s = open_side(rank, other);
    if (rank == 0) {
        CHECK_OK(send_bytes(&s, s.a, 16));
        CHECK_EQ(aclrtSynchronizeStreamWithTimeout(s.stream, 50), ACL_ERROR_RT_STREAM_SYNC_TIMEOUT);
        CHECK_EQ(status_of(s.stream), ACL_STREAM_STATUS_NOT_READY);
        in_step(other);                                     /* only now the other receives */
        CHECK_OK(aclrtSynchronizeStream(s.stream));
    } else {
        in_step(other);
        CHECK_OK(recv_bytes(&s, s.b, 16));
        CHECK_OK(aclrtSynchronizeStream(s.stream));
        CHECK(holds(s.b, 16, 0));
    }
    close_side(&s);
}

TEST(test_a_send_ends_after_its_receive)
{
    run_pair(send_waits);
}

static void both_send_first(uint32_t rank, int other)
{
    side s = open_side(rank, other);
    HcclSendRecvItem items[] = {
        { HCCL_SEND, s.a, BYTES / 2, HCCL_DATA_TYPE_INT8, s.peer },
        { HCCL_SEND, s.a + BYTES / 2, 1000, HCCL_DATA_TYPE_INT8, s.peer },
        { HCCL_RECV, s.b, BYTES / 2, HCCL_DATA_TYPE_INT8, s.peer },
        { HCCL_RECV, s.b + BYTES / 2, 1000, HCCL_DATA_TYPE_INT8, s.peer },
    };
    CHECK_OK(HcclBatchSendRecv(items, 4, s.comm, s.stream));
    CHECK_OK(aclrtSynchronizeStream(s.stream));
    CHECK(holds(s.b, BYTES / 2 + 1000, 1 - rank));
    close_side(&s);
}

TEST(test_items_of_one_batch_do_not_block_each_other)
{
    run_pair(both_send_first);
}

static void two_streams(uint32_t rank, int other)
{
    side s = open_side(rank, other);
    aclrtStream second = new_stream();
    if (rank == 0) {                                        /* both streams want the same channel at once */
        CHECK_OK(HcclSend(s.a, 1 << 20, HCCL_DATA_TYPE_INT8, 1, s.comm, s.stream));
        CHECK_OK(HcclSend(s.a, 1 << 20, HCCL_DATA_TYPE_INT8, 1, s.comm, second));
    } else {
        CHECK_OK(HcclRecv(s.b, 1 << 20, HCCL_DATA_TYPE_INT8, 0, s.comm, s.stream));
        CHECK_OK(HcclRecv(s.b + (1 << 20), 1 << 20, HCCL_DATA_TYPE_INT8, 0, s.comm, second));
    }
    CHECK_OK(aclrtSynchronizeStream(s.stream));
    CHECK_OK(aclrtSynchronizeStream(second));
    if (rank == 1)
        CHECK(holds(s.b, 1 << 20, 0) && holds(s.b + (1 << 20), 1 << 20, 0));
    CHECK_OK(aclrtDestroyStream(second));
    close_side(&s);
}

TEST(test_two_streams_take_turns_on_a_channel)
{
    run_pair(two_streams);
}

static void sizes_differ(uint32_t rank, int other)
{
    side s = open_side(rank, other);
    CHECK_OK(rank == 0 ? send_bytes(&s, s.a, 100) : recv_bytes(&s, s.b, 99));
    CHECK_ERR(aclrtSynchronizeStream(s.stream), ACL_ERROR_RT_PARAM_INVALID);
    CHECK(all_are(s.b, BYTES, 0));
    CHECK_OK(rank == 0 ? send_bytes(&s, s.a, 100) : recv_bytes(&s, s.b, 100));
    CHECK_OK(aclrtSynchronizeStream(s.stream));
    CHECK(rank == 0 || holds(s.b, 100, 0));
    close_side(&s);
}

TEST(test_sizes_that_differ_are_an_error_and_the_channel_goes_on)
{
    run_pair(sizes_differ);
}

static void barriers(uint32_t rank, int other)
{
    side s = open_side(rank, other);
    if (rank == 0) {
        CHECK_OK(HcclBarrier(s.comm, s.stream));
        CHECK_EQ(aclrtSynchronizeStreamWithTimeout(s.stream, 50), ACL_ERROR_RT_STREAM_SYNC_TIMEOUT);
        in_step(other);
    } else {
        in_step(other);
        CHECK_OK(HcclBarrier(s.comm, s.stream));
    }
    for (int i = 0; i < 100; i++)
        CHECK_OK(HcclBarrier(s.comm, s.stream));
    CHECK_OK(aclrtSynchronizeStream(s.stream));
    close_side(&s);
}

TEST(test_no_rank_leaves_a_barrier_before_all_have_come)
{
    run_pair(barriers);
}

static void aborted_receive(uint32_t rank, int other)
{
    side s = open_side(rank, other);
    if (rank == 1) {
        CHECK_OK(recv_bytes(&s, s.b, 16));
        CHECK_EQ(aclrtSynchronizeStreamWithTimeout(s.stream, 20), ACL_ERROR_RT_STREAM_SYNC_TIMEOUT);
        CHECK_OK(aclrtStreamAbort(s.stream));
        CHECK_OK(aclrtSynchronizeStream(s.stream));
        CHECK_OK(recv_bytes(&s, s.b, 16));                  /* nothing had begun: the channel is whole */
    }
    in_step(other);
    if (rank == 0)
        CHECK_OK(send_bytes(&s, s.a, 16));
    CHECK_OK(aclrtSynchronizeStream(s.stream));
    CHECK(rank == 0 || holds(s.b, 16, 0));
    close_side(&s);
}

TEST(test_a_receive_without_sender_can_be_aborted)
{
    run_pair(aborted_receive);
}

static void aborted_send(uint32_t rank, int other)
{
    side s = open_side(rank, other);
    HcclResult error = HCCL_SUCCESS;
    while (rank == 0 && !error) {                           /* an abort before the offer is out does no harm: try again */
        CHECK_OK(send_bytes(&s, s.a, 16));
        CHECK_EQ(aclrtSynchronizeStreamWithTimeout(s.stream, 1), ACL_ERROR_RT_STREAM_SYNC_TIMEOUT);
        CHECK_OK(aclrtStreamAbort(s.stream));
        CHECK_OK(aclrtSynchronizeStream(s.stream));
        CHECK_OK(HcclGetCommAsyncError(s.comm, &error));
    }
    in_step(other);
    if (rank == 1) {
        CHECK_OK(recv_bytes(&s, s.b, 16));                  /* the offer is here, but no process stands behind it */
        CHECK_ERR(aclrtSynchronizeStream(s.stream), ACL_ERROR_RT_SUSPECT_REMOTE_ERROR);
    }
    close_side(&s);
}

TEST(test_an_aborted_send_is_an_error_for_the_receiver)
{
    run_pair(aborted_send);
}

/* Far more than the socket holds. An abort may also come before the first byte or after the last: both then try again. */
static void aborted_halfway(uint32_t rank, int other)
{
    side s = open_side(rank, other);
    HcclResult error = HCCL_SUCCESS;
    aclError code = ACL_SUCCESS;
    while (rank == 0 && !code) {
        CHECK_OK(send_bytes(&s, s.a, BYTES));
        code = aclrtSynchronizeStream(s.stream);
    }
    while (rank == 1 && !error) {
        CHECK_OK(recv_bytes(&s, s.b, BYTES));
        CHECK_OK(aclrtStreamAbort(s.stream));
        CHECK_OK(aclrtSynchronizeStream(s.stream));
        CHECK_OK(HcclGetCommAsyncError(s.comm, &error));
    }
    CHECK_EQ(code, rank == 0 ? ACL_ERROR_RT_SUSPECT_REMOTE_ERROR : ACL_SUCCESS);
    CHECK_OK(rank == 0 ? send_bytes(&s, s.a, 1) : recv_bytes(&s, s.b, 1));
    CHECK_ERR(aclrtSynchronizeStream(s.stream), ACL_ERROR_RT_SUSPECT_REMOTE_ERROR);
    close_side(&s);
}

static void too_long(uint32_t rank, int other)
{
    setenv("HCCL_EXEC_TIMEOUT", "1", 1);
    side s = open_side(rank, other);
    if (rank == 1) {
        CHECK_OK(recv_bytes(&s, s.b, 16));
        CHECK_ERR(aclrtSynchronizeStream(s.stream), ACL_ERROR_RT_TASK_TIMEOUT);
    }
    close_side(&s);
}

TEST(test_a_receive_aborted_halfway_breaks_the_channel)
{
    run_pair(aborted_halfway);
}

TEST(test_waiting_has_a_limit)
{
    run_pair(too_long);
}

int main(void)
{
    RUN(test_bytes_there_and_back);
    RUN(test_pairs_keep_their_order);
    RUN(test_a_send_ends_after_its_receive);
    RUN(test_items_of_one_batch_do_not_block_each_other);
    RUN(test_two_streams_take_turns_on_a_channel);
    RUN(test_sizes_that_differ_are_an_error_and_the_channel_goes_on);
    RUN(test_no_rank_leaves_a_barrier_before_all_have_come);
    RUN(test_a_receive_without_sender_can_be_aborted);
    RUN(test_an_aborted_send_is_an_error_for_the_receiver);
    RUN(test_a_receive_aborted_halfway_breaks_the_channel);
    RUN(test_waiting_has_a_limit);
    return check_done();
}
