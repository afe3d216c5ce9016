/* HcclBatchPut and HcclBatchGet between two processes: every byte, and every bound. */
#include "hccl_pair.h"

enum { DEVICE, PINNED, ADOPTED_DEVICE, ADOPTED_HOST, REGIONS };
static const uint64_t sizes[REGIONS] = { 3145728 + 17, 1 << 20, 2500001, 65536 };
static const uint64_t guard = 64;                           /* bytes around each region that no rank may touch */

typedef struct side {
    uint32_t rank;
    int other;
    HcclComm comm;
    aclrtStream stream;
    uint8_t *whole[REGIONS], *region[REGIONS], *scratch;
    void *handle[REGIONS];
    uint8_t *remote[REGIONS];
} side;

static void allocate(side *s)
{
    for (int i = 0; i < REGIONS; i++) {
        uint64_t bytes = sizes[i] + 2 * guard;
        void *got = NULL;
        if (i == DEVICE)
            CHECK_OK(aclrtMalloc(&got, bytes, ACL_MEM_MALLOC_NORMAL_ONLY));
        else if (i == PINNED)
            CHECK_OK(aclrtMallocHost(&got, bytes));
        else
            got = malloc(bytes);
        s->whole[i] = got;
        s->region[i] = s->whole[i] + guard;
        memset(got, 0xee, bytes);
        fill(s->region[i], sizes[i], s->rank * 10 + (uint32_t)i);
    }
    void *scratch;
    CHECK_OK(aclrtMalloc(&scratch, sizes[DEVICE] + guard, ACL_MEM_MALLOC_NORMAL_ONLY));
    s->scratch = scratch;
}

static void open_side(side *s, uint32_t rank, int other)
{
    memset(s, 0, sizeof *s);
    s->rank = rank;
    s->other = other;
    allocate(s);
    s->comm = new_one_sided("onesided", rank);
    s->stream = new_stream();
    for (int i = 0; i < REGIONS; i++)
        s->handle[i] = bind_memory(s->comm, i == DEVICE || i == ADOPTED_DEVICE ? COMM_MEM_TYPE_DEVICE : COMM_MEM_TYPE_HOST,
                                   s->region[i], sizes[i]);
    CHECK_OK(prepare(s->comm, 20));
    tell(other, s->region, sizeof s->region);
    hear(other, s->remote, sizeof s->remote);
}

static void close_side(side *s)
{
    in_step(s->other);
    for (int i = 0; i < REGIONS; i++) {
        CHECK(all_are(s->whole[i], guard, 0xee) && all_are(s->region[i] + sizes[i], guard, 0xee));
        CHECK_OK(HcclCommUnbindMem(s->comm, s->handle[i]));
    }
    CHECK_OK(HcclCommDestroy(s->comm));
    for (int i = 0; i < REGIONS; i++)
        CHECK_OK(HcclDeregisterGlobalMem(s->handle[i]));
    CHECK_OK(aclrtDestroyStream(s->stream));
    CHECK_OK(aclrtFree(s->scratch));
    CHECK_OK(aclrtFree(s->whole[DEVICE]));
    CHECK_OK(aclrtFreeHost(s->whole[PINNED]));
    free(s->whole[ADOPTED_DEVICE]);
    free(s->whole[ADOPTED_HOST]);
}

static HcclResult move(side *s, bool put, void *local, void *remote, uint64_t bytes)
{
    HcclOneSideOpDesc desc = { local, remote, bytes, HCCL_DATA_TYPE_UINT8 };
    return (put ? HcclBatchPut : HcclBatchGet)(s->comm, 1 - s->rank, &desc, 1, s->stream);
}

static void read_everything(side *s)
{
    for (int i = 0; i < REGIONS; i++) {
        memset(s->scratch, 0, sizes[DEVICE]);
        CHECK_OK(move(s, false, s->scratch, s->remote[i], sizes[i]));
        CHECK_OK(aclrtSynchronizeStream(s->stream));
        CHECK(holds(s->scratch, sizes[i], (1 - s->rank) * 10 + (uint32_t)i));
    }
}

static void write_everything(side *s)
{
    for (int i = 0; i < REGIONS; i++) {
        fill(s->scratch, sizes[i], 100 + s->rank * 10 + (uint32_t)i);
        CHECK_OK(move(s, true, s->scratch, s->remote[i], sizes[i]));
        CHECK_OK(aclrtSynchronizeStream(s->stream));
    }
}

static void bytes_arrive(uint32_t rank, int other)
{
    side s;
    open_side(&s, rank, other);
    read_everything(&s);
    in_step(other);                                         /* neither writes before the other has read */
    write_everything(&s);
    in_step(other);
    for (int i = 0; i < REGIONS; i++)
        CHECK(holds(s.region[i], sizes[i], 100 + (1 - rank) * 10 + (uint32_t)i));
    close_side(&s);
}

TEST(test_every_byte_of_every_kind_of_memory_arrives)
{
    run_pair(bytes_arrive);
}

static void out_of_bounds(uint32_t rank, int other)
{
    side s;
    open_side(&s, rank, other);
    for (int i = 0; i < REGIONS; i++)
        for (int put = 0; put < 2; put++) {
            uint8_t *base = s.remote[i];
            CHECK_ERR(move(&s, put, s.scratch, base - 1, 1), HCCL_E_INTERNAL);
            CHECK_ERR(move(&s, put, s.scratch, base - 1, 2), HCCL_E_INTERNAL);
            CHECK_ERR(move(&s, put, s.scratch, base + sizes[i], 1), HCCL_E_INTERNAL);
            CHECK_ERR(move(&s, put, s.scratch, base + sizes[i] - 1, 2), HCCL_E_INTERNAL);
            CHECK_ERR(move(&s, put, s.scratch, base, sizes[i] + 1), HCCL_E_INTERNAL);
            CHECK_OK(move(&s, put, s.scratch, base + sizes[i] - 1, 1));
            CHECK_OK(move(&s, put, s.scratch, base, 1));
            CHECK_OK(move(&s, put, s.scratch, base + sizes[i], 0));
        }
    uint64_t strange[] = { 1, 4096, UINT64_MAX, UINT64_MAX - 15, UINT64_MAX - 16, (uint64_t)1 << 63,
            (uint64_t)(uintptr_t)s.scratch };
    for (size_t i = 0; i < sizeof strange / sizeof *strange; i++)
        CHECK_ERR(move(&s, true, s.scratch, (void *)(uintptr_t)strange[i], 16), HCCL_E_INTERNAL);
    /* the local range is checked, too */
    CHECK_ERR(move(&s, true, s.scratch, s.remote[0], UINT64_MAX), HCCL_E_PARA);
    CHECK_ERR(move(&s, true, s.scratch + sizes[DEVICE] + guard - 1, s.remote[0], 2), HCCL_E_PARA);
    CHECK_ERR(move(&s, true, &s, s.remote[0], 8), HCCL_E_PARA);
    /* 8 bytes, after the overflow */
    HcclOneSideOpDesc desc = { s.scratch, s.remote[0], UINT64_MAX / 8 + 2, HCCL_DATA_TYPE_FP64 };
    CHECK_ERR(HcclBatchGet(s.comm, 1 - rank, &desc, 1, s.stream), HCCL_E_PARA);
    desc = (HcclOneSideOpDesc){ s.scratch, s.remote[0], 1, (HcclDataType)13 };
    CHECK_ERR(HcclBatchGet(s.comm, 1 - rank, &desc, 1, s.stream), HCCL_E_PARA);
    CHECK_OK(aclrtSynchronizeStream(s.stream));
    close_side(&s);
}

TEST(test_ranges_outside_one_bound_region_are_refused)
{
    run_pair(out_of_bounds);
}

static void one_bad_item(uint32_t rank, int other)
{
    side s;
    open_side(&s, rank, other);
    if (rank == 0) {
        HcclOneSideOpDesc items[3];
        memset(s.scratch, 0x55, 4096);
        for (int i = 0; i < 3; i++)
            items[i] = (HcclOneSideOpDesc){ s.scratch, s.remote[i], 64, HCCL_DATA_TYPE_INT8 };
        items[2].remoteAddr = s.remote[2] - 1;
        CHECK_ERR(HcclBatchPut(s.comm, 1, items, 3, s.stream), HCCL_E_INTERNAL);
        CHECK_OK(aclrtSynchronizeStream(s.stream));
    }
    in_step(other);
    for (int i = 0; i < REGIONS; i++)
        CHECK(holds(s.region[i], sizes[i], rank * 10 + (uint32_t)i));
    close_side(&s);
}

TEST(test_one_bad_item_and_nothing_is_done)
{
    run_pair(one_bad_item);
}

/* Blocks of the peer, backwards, so that no two can be joined; region i alternates between mapped and private memory. */
static void many_items(uint32_t rank, int other)
{
    enum { COUNT = 256, BLOCK = 200 };
    side s;
    open_side(&s, rank, other);
    HcclOneSideOpDesc items[COUNT + 1];
    for (int i = 0; i <= COUNT; i++)
        items[i] = (HcclOneSideOpDesc){ s.scratch + i * BLOCK, s.remote[i % 3] + (COUNT - i) * BLOCK, BLOCK / 4,
                HCCL_DATA_TYPE_FP32 };
    CHECK_OK(HcclBatchGet(s.comm, 1 - rank, items, 0, s.stream));
    CHECK_OK(HcclBatchGet(s.comm, 1 - rank, NULL, 0, s.stream));
    CHECK_ERR(HcclBatchGet(s.comm, 1 - rank, items, COUNT + 1, s.stream), HCCL_E_PARA);
    CHECK_OK(HcclBatchGet(s.comm, 1 - rank, items, COUNT, s.stream));
    CHECK_OK(aclrtSynchronizeStream(s.stream));
    for (int i = 0; i < COUNT; i++)
        for (int at = 0; at < BLOCK; at++)
            if (s.scratch[i * BLOCK + at] != pattern((1 - rank) * 10 + (uint32_t)(i % 3),
                                                     (uint64_t)((COUNT - i) * BLOCK + at)))
                CHECK_EQ(i, -1);
    close_side(&s);
}

TEST(test_256_scattered_items_and_no_more)
{
    run_pair(many_items);
}

static void joined_items(uint32_t rank, int other)
{
    enum { COUNT = 256, BLOCK = 9000 };
    side s;
    open_side(&s, rank, other);
    HcclOneSideOpDesc items[COUNT];
    for (int region = DEVICE; region <= ADOPTED_DEVICE; region += ADOPTED_DEVICE - DEVICE) {
        for (int i = 0; i < COUNT; i++)
            items[i] = (HcclOneSideOpDesc){ s.scratch + i * BLOCK, s.remote[region] + i * BLOCK, BLOCK,
                    HCCL_DATA_TYPE_INT8 };
        CHECK_OK(HcclBatchGet(s.comm, 1 - rank, items, COUNT, s.stream));
        CHECK_OK(aclrtSynchronizeStream(s.stream));
        CHECK(holds(s.scratch, COUNT * BLOCK, (1 - rank) * 10 + (uint32_t)region));
    }
    close_side(&s);
}

TEST(test_adjacent_items_arrive_as_one)
{
    run_pair(joined_items);
}

static void freed_memory(uint32_t rank, int other)
{
    side s;
    open_side(&s, rank, other);
    if (rank == 0) {
        void *short_lived;
        CHECK_OK(aclrtMalloc(&short_lived, 4096, ACL_MEM_MALLOC_NORMAL_ONLY));
        softnpu_fault("HcclBatchGet:delay=50");
        CHECK_OK(move(&s, false, short_lived, s.remote[DEVICE], 4096));
        CHECK_OK(aclrtFree(short_lived));                   /* a mistake that must not crash */
        CHECK_ERR(aclrtSynchronizeStream(s.stream), ACL_ERROR_RT_PARAM_INVALID);
        CHECK_ERR(move(&s, false, short_lived, s.remote[DEVICE], 4096), HCCL_E_PARA);
    }
    close_side(&s);
}

TEST(test_local_memory_freed_too_early_is_an_error)
{
    run_pair(freed_memory);
}

static void injected(uint32_t rank, int other)
{
    side s;
    open_side(&s, rank, other);
    softnpu_fault("HcclBatchGet:fail=9;HcclBatchPut:exec=507057");
    CHECK_ERR(move(&s, false, s.scratch, s.remote[DEVICE], 64), HCCL_E_TIMEOUT);
    CHECK_OK(move(&s, false, s.scratch, s.remote[DEVICE], 64));
    CHECK_OK(aclrtSynchronizeStream(s.stream));
    CHECK_OK(move(&s, true, s.scratch, s.remote[DEVICE], 64));
    CHECK_ERR(aclrtSynchronizeStream(s.stream), ACL_ERROR_RT_SUSPECT_REMOTE_ERROR);
    in_step(other);
    CHECK(holds(s.region[DEVICE], sizes[DEVICE], rank * 10));
    close_side(&s);
}

TEST(test_injected_faults)
{
    run_pair(injected);
}

/* One bit is not as it was sent, that of byte `at`; none, if there is no such byte. */
static bool only_differs_at(const uint8_t *bytes, uint64_t size, uint32_t seed, uint64_t at)
{
    if (at >= size)
        return holds(bytes, size, seed);
    return holds(bytes, at, seed) && bytes[at] == (pattern(seed, at) ^ 1) && holds_from(bytes + at + 1, size - at - 1, seed, at + 1);
}

static const struct { const char *spec; uint64_t at; } flips[] = {
    { "flip=0", 0 }, { "flip=1234567", 1234567 }, { "flip=-1", 2499999 }, { "flip=-2500000", 0 }, { "flip=99999999", 2499999 },
    { "flip=-99999999", 0 },
};
enum { FLIPPED = 2500000 };                                 /* no more than mapped and private memory of the peer have */

static void flipped(uint32_t rank, int other)
{
    side s;
    char spec[64];
    open_side(&s, rank, other);
    for (size_t i = 0; i < sizeof flips / sizeof *flips; i++)
        for (int region = DEVICE; region <= ADOPTED_DEVICE; region += ADOPTED_DEVICE - DEVICE) {
            snprintf(spec, sizeof spec, "HcclBatchGet:%s@2", flips[i].spec);
            CHECK_EQ(softnpu_fault(spec), 0);
            for (int nth = 1; nth <= 3; nth++) {
                CHECK_OK(move(&s, false, s.scratch, s.remote[region], FLIPPED));
                CHECK_OK(aclrtSynchronizeStream(s.stream)); /* nothing says so */
                uint64_t at = nth == 2 ? flips[i].at : UINT64_MAX;
                CHECK(only_differs_at(s.scratch, FLIPPED, (1 - rank) * 10 + (uint32_t)region, at));
            }
        }
    in_step(other);
    for (int region = DEVICE; region <= ADOPTED_DEVICE; region += ADOPTED_DEVICE - DEVICE) {
        fill(s.scratch, FLIPPED, 50);
        CHECK_EQ(softnpu_fault("HcclBatchPut:flip=777777"), 0);
        CHECK_OK(move(&s, true, s.scratch, s.remote[region], FLIPPED));
        CHECK_OK(aclrtSynchronizeStream(s.stream));
        CHECK(holds(s.scratch, FLIPPED, 50));               /* what was read is left as it was */
    }
    in_step(other);
    CHECK(only_differs_at(s.region[DEVICE], FLIPPED, 50, 777777));
    CHECK(only_differs_at(s.region[ADOPTED_DEVICE], FLIPPED, 50, 777777));
    close_side(&s);
}

TEST(test_a_flipped_bit_arrives_wrong_and_no_other)
{
    run_pair(flipped);
}

static void flipped_item(uint32_t rank, int other)
{
    side s;
    open_side(&s, rank, other);
    HcclOneSideOpDesc items[3];
    for (int i = 0; i < 3; i++)                             /* backwards: none is joined to the one before */
        items[i] = (HcclOneSideOpDesc){ s.scratch + (2 - i) * 1000, s.remote[DEVICE] + (2 - i) * 1000, 1000, HCCL_DATA_TYPE_INT8 };
    CHECK_EQ(softnpu_fault("HcclBatchGet:flip=1001"), 0);
    CHECK_OK(HcclBatchGet(s.comm, 1 - rank, items, 3, s.stream));
    CHECK_OK(aclrtSynchronizeStream(s.stream));
    CHECK(only_differs_at(s.scratch, 3000, (1 - rank) * 10 + DEVICE, 1001));
    close_side(&s);
}

TEST(test_the_place_of_a_flip_is_counted_through_the_items)
{
    run_pair(flipped_item);
}

int main(void)
{
    RUN(test_every_byte_of_every_kind_of_memory_arrives);
    RUN(test_ranges_outside_one_bound_region_are_refused);
    RUN(test_one_bad_item_and_nothing_is_done);
    RUN(test_256_scattered_items_and_no_more);
    RUN(test_adjacent_items_arrive_as_one);
    RUN(test_local_memory_freed_too_early_is_an_error);
    RUN(test_injected_faults);
    RUN(test_a_flipped_bit_arrives_wrong_and_no_other);
    RUN(test_the_place_of_a_flip_is_counted_through_the_items);
    return check_done();
}
