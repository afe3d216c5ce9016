/* The fault `flip` over RoCE: requests are carried out one by one, and the byte is counted through all of a call's. */
#include "roce_kit.h"

static uint64_t differing(const uint8_t *bytes, uint64_t size, uint64_t *where)
{
    uint64_t count = 0;
    for (uint64_t i = 0; i < size; i++)
        if (bytes[i] != pattern(1, i)) {
            *where = i;
            count++;
        }
    return count;
}

static void flipped(uint32_t rank, int other)
{
    static const struct { const char *spec; uint64_t at; } flips[] = {
        { "HcclBatchGet:flip=0", 0 }, { "HcclBatchGet:flip=150", 150 }, { "HcclBatchGet:flip=-1", 299 }, { "HcclBatchGet:flip=300", 299 },
    };
    roce_end end = open_end(rank, other);
    uint64_t where = 0;
    for (size_t i = 0; rank == 0 && i < sizeof flips / sizeof *flips; i++) {
        HcclOneSideOpDesc items[] = { item(&end, 0, 0, 100), item(&end, 100, 100, 100), item(&end, 200, 200, 100) };
        CHECK_EQ(softnpu_fault(flips[i].spec), 0);
        CHECK_OK(HcclBatchGet(end.comm, 1, items, 3, end.free));
        CHECK_OK(aclrtSynchronizeStream(end.free));
        CHECK_EQ(differing(end.mine, 300, &where), 1);
        CHECK_EQ(where, flips[i].at);
    }
    in_step(other);
    if (rank == 0) {
        fill(end.mine, 300, 1);
        CHECK_EQ(softnpu_fault("HcclBatchPut:flip=-2"), 0);
        CHECK_OK(put(&end, end.free, 0, 0, 300));
        CHECK_OK(aclrtSynchronizeStream(end.free));
        CHECK_EQ(differing(end.mine, 300, &where), 0);
    }
    in_step(other);
    if (rank == 1) {
        CHECK_EQ(differing(end.mine, LENT, &where), 1);
        CHECK_EQ(where, 298);
    }
    close_end(&end);
}

TEST(test_one_bit_of_one_request_arrives_wrong)
{
    run_roce(flipped);
}

int main(void)
{
    RUN(test_one_bit_of_one_request_arrives_wrong);
    return check_done();
}
