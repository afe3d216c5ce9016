/* Whether a program leaves requests in its communicator, which over RDMA are carried out when that is used again. */
#include "ring_kit.h"

enum { GRACE_MS = 250 };            /* a process that gets no core for so long is no device that hangs */

static ring_completion end_of(int op, bool abort, int refused)
{
    fake_reset();
    fake_hold();
    if (refused)
        fake_fail(GET, 1, HCCL_E_INTERNAL);
    ring *r = open_ring(4, 200, 0, GRACE_MS);
    script s = { 0 };
    script_move(&s, op, ACL_MEMCPY_DEVICE_TO_DEVICE, 1, 2, 100);
    CHECK_EQ(submit(r, 1, &s, PATIENCE_MS), RING_QUEUED);
    if (abort) {
        fake_reached(op == RING_GET ? GET : COPY_ASYNC, 1);
        CHECK_EQ(ring_cancel(r, 1), 1);
    } else {
        fake_let_all();
    }
    ring_completion done = next_completion(r);
    fake_let_all();
    close_ring(r);
    return done;
}

TEST(test_what_landed_leaves_nothing)
{
    ring_completion done = end_of(RING_GET, false, 0);
    CHECK_EQ(done.state, RING_DONE);
    CHECK_EQ(done.unclean, 0);
}

TEST(test_an_aborted_get_may_leave_requests)
{
    ring_completion done = end_of(RING_GET, true, 0);
    CHECK_EQ(done.state, RING_CANCELLED);
    CHECK_EQ(done.unclean, 1);
}

TEST(test_a_refused_get_may_leave_requests)
{
    ring_completion done = end_of(RING_GET, false, HCCL_E_INTERNAL);
    CHECK_EQ(done.state, RING_FAILED);
    CHECK_EQ(done.unclean, 1);
}

TEST(test_a_cancelled_get_whose_windows_landed_leaves_nothing)
{
    fake_reset();
    fake_hold();
    ring *r = open_ring(4, 200, 0, PATIENCE_MS);
    script s = { 0 };
    script_move(&s, RING_GET, 0, 1, 8, 100);
    CHECK_EQ(submit(r, 1, &s, PATIENCE_MS), RING_QUEUED);
    fake_reached(SYNC_EVENT, 1);
    CHECK_EQ(ring_cancel(r, 1), 1);
    fake_let_all();
    ring_completion done = next_completion(r);
    CHECK_EQ(done.state, RING_CANCELLED);
    CHECK_EQ(done.unclean, 0);
    close_ring(r);
}

TEST(test_aborted_copies_leave_nothing)
{
    ring_completion done = end_of(RING_COPY, true, 0);
    CHECK_EQ(done.state, RING_CANCELLED);
    CHECK_EQ(done.unclean, 0);
}

int main(void)
{
    RUN(test_what_landed_leaves_nothing);
    RUN(test_an_aborted_get_may_leave_requests);
    RUN(test_a_refused_get_may_leave_requests);
    RUN(test_a_cancelled_get_whose_windows_landed_leaves_nothing);
    RUN(test_aborted_copies_leave_nothing);
    return check_done();
}
