/* Copiers share large copies: several streams at a time, in ranges of all sizes, every byte once; and an abort ends all of them.
 * What copies much is put behind what wakes. */
#include "hccl_pair.h"
#include <dirent.h>
#include <sched.h>
#include <sys/syscall.h>

enum { COPIERS = 4, STREAMS = 4, ROUNDS = 2, RANGES = 96, MAPPED = 0, PRIVATE = 1 };
static const uint64_t size = 2 << 20;                       /* of what one stream moves */

typedef struct end {
    uint32_t rank;
    int other;
    HcclComm comm;
    aclrtStream stream[STREAMS];
    uint8_t *shown[2], *remote[2], *local;
    void *handle[2];
} end;

static uint64_t seed = 7;
static uint64_t below(uint64_t n)                           /* splitmix64 */
{
    uint64_t z = seed += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return (z ^ z >> 31) % n;
}

static void open_end(end *e, uint32_t rank, int other)
{
    void *device, *local;
    *e = (end){ .rank = rank, .other = other };
    CHECK_OK(aclrtMalloc(&device, STREAMS * size, ACL_MEM_MALLOC_NORMAL_ONLY));
    CHECK_OK(aclrtMalloc(&local, STREAMS * size, ACL_MEM_MALLOC_NORMAL_ONLY));
    e->shown[MAPPED] = device;
    e->shown[PRIVATE] = malloc(STREAMS * size);
    e->local = local;
    e->comm = new_one_sided("copiers", rank);
    for (int i = 0; i < 2; i++) {
        fill(e->shown[i], STREAMS * size, rank * 2 + (uint32_t)i);
        e->handle[i] = bind_memory(e->comm, COMM_MEM_TYPE_DEVICE, e->shown[i], STREAMS * size);
    }
    for (int i = 0; i < STREAMS; i++)
        e->stream[i] = new_stream();
    CHECK_OK(prepare(e->comm, 20));
    tell(other, e->shown, sizeof e->shown);
    hear(other, e->remote, sizeof e->remote);
}

static void close_end(end *e)
{
    in_step(e->other);
    for (int i = 0; i < 2; i++)
        CHECK_OK(HcclCommUnbindMem(e->comm, e->handle[i]));
    CHECK_OK(HcclCommDestroy(e->comm));
    for (int i = 0; i < 2; i++)
        CHECK_OK(HcclDeregisterGlobalMem(e->handle[i]));
    for (int i = 0; i < STREAMS; i++)
        CHECK_OK(aclrtDestroyStream(e->stream[i]));
    CHECK_OK(aclrtFree(e->local));
    CHECK_OK(aclrtFree(e->shown[MAPPED]));
    free(e->shown[PRIVATE]);
}

/* One stream's share in random ranges, of which none touches the next, so that they stay apart: a byte between two is not moved. */
static uint64_t describe(HcclOneSideOpDesc *desc, uint8_t *local, uint8_t *remote, uint64_t *gaps)
{
    uint64_t at = 0, count = 0;
    while (count < RANGES && at + 2 < size) {
        uint64_t most = count % 3 ? 2000 : 300000, bytes = 1 + below(most < size - at - 1 ? most : size - at - 1);
        desc[count] = (HcclOneSideOpDesc){ local + at, remote + at, bytes, HCCL_DATA_TYPE_UINT8 };
        gaps[count++] = at + bytes;
        at += bytes + 1;
    }
    return count;
}

static void check_moved(const HcclOneSideOpDesc *desc, uint64_t count, const uint64_t *gaps, const uint8_t *local, uint64_t first,
                        uint32_t source)
{
    for (uint64_t i = 0; i < count; i++) {
        const uint8_t *at = desc[i].localAddr;
        CHECK(holds_from(at, desc[i].count, source, first + (uint64_t)(at - local)));
        CHECK_EQ(local[gaps[i]], 0xee);
    }
}

static void all_streams_at_once(uint32_t rank, int other)
{
    static HcclOneSideOpDesc desc[STREAMS][RANGES];
    static uint64_t gaps[STREAMS][RANGES];
    uint64_t count[STREAMS];
    end e;
    open_end(&e, rank, other);
    for (int round = 0; round < ROUNDS; round++)
        for (int kind = MAPPED; kind <= PRIVATE; kind++) {
            memset(e.local, 0xee, STREAMS * size);
            for (int i = 0; i < STREAMS; i++) {
                uint64_t at = (uint64_t)i * size;
                count[i] = describe(desc[i], e.local + at, e.remote[kind] + at, gaps[i]);
                CHECK_OK(HcclBatchGet(e.comm, 1 - rank, desc[i], (uint32_t)count[i], e.stream[i]));
            }
            for (int i = 0; i < STREAMS; i++) {
                CHECK_OK(aclrtSynchronizeStream(e.stream[i]));
                check_moved(desc[i], count[i], gaps[i], e.local + (uint64_t)i * size, (uint64_t)i * size, (1 - rank) * 2 + (uint32_t)kind);
            }
        }
    close_end(&e);
}

static void an_abort(uint32_t rank, int other)
{
    end e;
    open_end(&e, rank, other);
    for (int round = 0; round < 10; round++) {
        HcclOneSideOpDesc desc = { e.local, e.remote[round % 2], STREAMS * size, HCCL_DATA_TYPE_UINT8 };
        CHECK_OK(HcclBatchGet(e.comm, 1 - rank, &desc, 1, e.stream[0]));
        CHECK_OK(aclrtStreamAbort(e.stream[0]));
        aclrtSynchronizeStream(e.stream[0]);                /* from here on no copier writes */
        memset(e.local, 0xee, STREAMS * size);
        CHECK(all_are(e.local, STREAMS * size, 0xee));
    }
    close_end(&e);
}

/* Nanoseconds of the shortest turns of this process's threads of this name; 0: the kernel knows none, or there are fewer. */
static uint64_t turns_of(const char *name, int threads)
{
    struct { uint32_t size, policy; uint64_t flags; int32_t nice; uint32_t priority; uint64_t runtime, deadline, period; } attr = { 0 };
    uint64_t least = UINT64_MAX;
    char path[300], comm[32];
    DIR *tasks = opendir("/proc/self/task");
    for (struct dirent *task; (task = readdir(tasks)); ) {
        snprintf(path, sizeof path, "/proc/self/task/%s/comm", task->d_name);
        FILE *file = fopen(path, "r");
        bool is_read = file && fgets(comm, sizeof comm, file);
        if (file)
            fclose(file);
        if (!is_read || strcspn(comm, "\n") != strlen(name) || strncmp(comm, name, strlen(name)))
            continue;
        threads--;
        CHECK_OK((int)syscall(SYS_sched_getattr, (pid_t)atoi(task->d_name), &attr, sizeof attr, 0));
        least = attr.runtime < least ? attr.runtime : least;
    }
    closedir(tasks);
    return threads > 0 ? 0 : least;
}

static void get(end *e, uint32_t rank, uint64_t bytes)
{
    HcclOneSideOpDesc desc = { e->local, e->remote[MAPPED], bytes, HCCL_DATA_TYPE_UINT8 };
    CHECK_OK(HcclBatchGet(e->comm, 1 - rank, &desc, 1, e->stream[0]));
    CHECK_OK(aclrtSynchronizeStream(e->stream[0]));
}

/* The kernel lets a thread that wakes pass one that runs, if that has the longer turns: else it looks 250 times a second. */
static void turns(uint32_t rank, int other)
{
    end e;
    int32_t id = 0;
    char worker[32];
    open_end(&e, rank, other);
    uint64_t mine = turns_of("test_copiers", 1);
    get(&e, rank, STREAMS * size);
    CHECK_OK(aclrtStreamGetId(e.stream[0], &id));
    snprintf(worker, sizeof worker, "softnpu-s%d", (int)id);
    if (mine) {
        CHECK(turns_of(worker, 1) > mine);
        for (time_t limit = time(NULL) + 20; turns_of("softnpu-copier", COPIERS - 1) < mine && time(NULL) < limit;)
            sched_yield();                                  /* the last of them may not have begun */
        CHECK(turns_of("softnpu-copier", COPIERS - 1) > mine);
        get(&e, rank, 500 << 10);                           /* shared by no copier */
        CHECK(turns_of(worker, 1) < mine);
        CHECK(turns_of("softnpu-copier", COPIERS - 1) > mine);
    }
    close_end(&e);
}

TEST(test_several_streams_share_the_copiers) { run_pair(all_streams_at_once); }
TEST(test_an_abort_ends_all_of_them) { run_pair(an_abort); }
TEST(test_what_copies_much_stands_behind_what_wakes) { run_pair(turns); }

int main(void)
{
    setenv("SOFTNPU_COPIERS", "4", 1);
    RUN(test_several_streams_share_the_copiers);
    RUN(test_an_abort_ends_all_of_them);
    RUN(test_what_copies_much_stands_behind_what_wakes);
    setenv("SOFTNPU_COPIERS", "1", 1);
    RUN(test_several_streams_share_the_copiers);
    return check_done();
}
