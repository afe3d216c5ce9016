/* A batch is walked item by item; the first bad one ends the call, and those before it are posted, with no fence and no doorbell.
 * [src hccl_one_sided_conn.cc:328-354, 357-383] */
#include "roce_kit.h"

static void half_issued(uint32_t rank, int other)
{
    roce_end end = open_end(rank, other);
    if (rank == 0) {
        memset(end.mine, 7, QUARTER);
        HcclOneSideOpDesc items[] = { item(&end, 0, 0, 100), item(&end, 0, 1000, 100), item(&end, 0, LENT, 100),
            item(&end, 0, 2000, 100) };
        CHECK_ERR(HcclBatchPut(end.comm, 1, items, 4, end.free), HCCL_E_INTERNAL);
        CHECK_OK(aclrtSynchronizeStream(end.free));         /* it got nothing to do */
        memset(end.mine, 9, QUARTER);
        CHECK_OK(get(&end, end.free, QUARTER, 0, QUARTER));
        CHECK_OK(aclrtSynchronizeStream(end.free));         /* by its own fence: there is no other */
        CHECK(all_are(end.mine + QUARTER, 100, 9));
        CHECK(all_are(end.mine + QUARTER + 1000, 100, 9));
        CHECK_EQ(end.mine[QUARTER + 100], pattern(1, 100));
        CHECK_EQ(end.mine[QUARTER + 2000], pattern(1, 2000));
    }
    close_end(&end);
}

TEST(test_items_before_a_bad_one_are_posted_and_run_at_the_next_doorbell)
{
    run_roce(half_issued);
}

int main(void)
{
    RUN(test_items_before_a_bad_one_are_posted_and_run_at_the_next_doorbell);
    return check_done();
}
