/* Descriptors through a ring: get and put between two processes, and faults of them. */
#include "hccl_pair.h"
#include "ring_soft.h"

enum { BLOCKS = 600, BLOCK = 1000, SIZE = BLOCKS * BLOCK, EXEC_CODE = 507057 };

typedef struct ends { HcclComm comm; void *handle; uint8_t *mine, *theirs, *scratch; } ends;

static ends open_ends(uint32_t rank, int other)
{
    ends e = { .comm = new_one_sided("ring", rank) };
    CHECK_OK(aclrtMalloc((void **)&e.mine, SIZE, ACL_MEM_MALLOC_NORMAL_ONLY));
    CHECK_OK(aclrtMalloc((void **)&e.scratch, SIZE, ACL_MEM_MALLOC_NORMAL_ONLY));
    fill(e.mine, SIZE, rank);
    e.handle = bind_memory(e.comm, COMM_MEM_TYPE_DEVICE, e.mine, SIZE);
    CHECK_OK(prepare(e.comm, 20));
    tell(other, &e.mine, sizeof e.mine);
    hear(other, &e.theirs, sizeof e.theirs);
    return e;
}

static void close_ends(ends *e, int other)
{
    in_step(other);
    CHECK_OK(HcclCommUnbindMem(e->comm, e->handle));
    CHECK_OK(HcclCommDestroy(e->comm));
    CHECK_OK(HcclDeregisterGlobalMem(e->handle));
    CHECK_OK(aclrtFree(e->mine));
    CHECK_OK(aclrtFree(e->scratch));
}

typedef struct backwards { uint64_t local, remote, here[BLOCKS], there[BLOCKS]; ring_step step; } backwards;

static const ring_step *write_blocks(backwards *g, const ends *e, int op, void *local)    /* the last block first: nothing is merged */
{
    g->local = (uint64_t)local;
    g->remote = (uint64_t)e->theirs;
    for (uint64_t i = 0; i < BLOCKS; i++)
        g->here[i] = g->there[i] = BLOCKS - 1 - i;
    g->step = (ring_step){ .op = op, .rank = 1, .handle = e->comm, .grid = {
        &g->local, &g->remote, g->here, g->there, 1, BLOCKS, BLOCK, BLOCK, BLOCK, BLOCK } };
    return &g->step;
}

static void get_and_put(uint32_t rank, int other)
{
    ends e = open_ends(rank, other);
    backwards g;
    if (rank == 0) {
        ring *r = open_ring(100000, 0, 1000);
        CHECK_DONE(run_steps(r, 1, write_blocks(&g, &e, RING_GET, e.scratch), 1, PATIENCE_MS), 1, RING_DONE, SIZE);
        CHECK(holds(e.scratch, SIZE, 1));
        CHECK_DONE(run_steps(r, 2, write_blocks(&g, &e, RING_PUT, e.mine), 1, PATIENCE_MS), 2, RING_DONE, SIZE);
        close_ring(r);
    }
    in_step(other);
    CHECK(holds(e.mine, SIZE, 0));                          /* both have rank 0's now */
    close_ends(&e, other);
}

static void faulty(uint32_t rank, int other)
{
    ends e = open_ends(rank, other);
    backwards g;
    if (rank == 0) {
        ring *r = open_ring(1000000, 0, 1000);
        const ring_step *step = write_blocks(&g, &e, RING_GET, e.scratch);
        CHECK_EQ(softnpu_fault("HcclBatchGet:fail=21@2"), 0);
        ring_completion done = run_steps(r, 1, step, 1, PATIENCE_MS);
        CHECK_EQ(done.state, RING_FAILED);
        CHECK_EQ(done.origin, RING_HCCL);
        CHECK_EQ(done.code, 21);
        CHECK_EQ(done.ranges, 192);
        CHECK_EQ(softnpu_fault("HcclBatchGet:exec=507057@3"), 0);
        done = run_steps(r, 2, step, 1, PATIENCE_MS);
        CHECK_EQ(done.state, RING_FAILED);
        CHECK_EQ(done.code, EXEC_CODE);
        CHECK_EQ(softnpu_fault("HcclBatchGet:hang"), 0);
        done = run_steps(r, 3, step, 1, 40);
        CHECK_EQ(done.state, RING_TIMED_OUT);
        memset(e.scratch, 0xaa, SIZE);
        CHECK_DONE(run_steps(r, 4, NULL, 0, PATIENCE_MS), 4, RING_DONE, 0);
        CHECK(all_are(e.scratch, SIZE, 0xaa));              /* quiet */
        CHECK_DONE(run_steps(r, 5, step, 1, PATIENCE_MS), 5, RING_DONE, SIZE);
        CHECK(holds(e.scratch, SIZE, 1));
        close_ring(r);
    }
    close_ends(&e, other);
}

TEST(test_blocks_are_got_and_put_in_batches) { run_pair(get_and_put); }
TEST(test_faults_of_descriptors_end_their_program_and_no_other) { run_pair(faulty); }

int main(void)
{
    RUN(test_blocks_are_got_and_put_in_batches);
    RUN(test_faults_of_descriptors_end_their_program_and_no_other);
    return check_done();
}
