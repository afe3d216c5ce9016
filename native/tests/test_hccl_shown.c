/* softnpu_comm_show: a peer reaches what it is shown, and in the way that it is shown. */
#include <errno.h>
#include <sys/mman.h>
#include "hccl_pair.h"
#include "softnpu.h"

enum { SHOW_NOTHING = 0, SHOW_READ = 1, SHOW_ALL = 3 };
enum { HIDDEN, READABLE, SHOWN, REGIONS };
static const uint64_t bytes = 3 << 20;
static const int shows[REGIONS] = { SHOW_NOTHING, SHOW_READ, SHOW_ALL };

static HcclResult move(HcclComm comm, aclrtStream stream, bool put, void *mine, void *theirs)
{
    HcclOneSideOpDesc item = { mine, theirs, 4096, HCCL_DATA_TYPE_INT8 };
    HcclResult code = put ? HcclBatchPut(comm, 0, &item, 1, stream) : HcclBatchGet(comm, 0, &item, 1, stream);
    CHECK_OK(aclrtSynchronizeStream(stream));
    return code;
}

/* Mappings of softnpu's files that this process can only read; each must refuse to become writable. */
static int read_only_mappings(void)
{
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[512], mode[8];
    unsigned long from, to;
    int found = 0;
    while (maps && fgets(line, sizeof line, maps))
        if (strstr(line, "memfd:softnpu") && sscanf(line, "%lx-%lx %7s", &from, &to, mode) == 3 && !strcmp(mode, "r--s")) {
            found++;
            CHECK(to - from == bytes);
            CHECK(mprotect((void *)from, to - from, PROT_READ | PROT_WRITE) == -1 && errno == EACCES);
        }
    if (maps)
        fclose(maps);
    return found;
}

static void peer(HcclComm comm, uint8_t *const *theirs)
{
    void *got;
    CHECK_OK(aclrtMalloc(&got, bytes, ACL_MEM_MALLOC_NORMAL_ONLY));
    aclrtStream stream = new_stream();
    uint8_t *mine = got;
    memset(mine, 0x55, bytes);
    CHECK_EQ(move(comm, stream, false, mine, theirs[HIDDEN]), HCCL_E_INTERNAL);
    CHECK_EQ(move(comm, stream, true, mine, theirs[HIDDEN]), HCCL_E_INTERNAL);
    CHECK_EQ(move(comm, stream, true, mine, theirs[READABLE]), HCCL_E_INTERNAL);
    CHECK(all_are(mine, bytes, 0x55));
    CHECK_OK(move(comm, stream, false, mine, theirs[READABLE]));
    CHECK(all_are(mine, 4096, READABLE) && all_are(mine + 4096, bytes - 4096, 0x55));
    CHECK_OK(move(comm, stream, false, mine, theirs[SHOWN]));
    CHECK(all_are(mine, 4096, SHOWN));
    memset(mine, 0x77, bytes);
    CHECK_OK(move(comm, stream, true, mine, theirs[SHOWN]));
    CHECK_EQ(read_only_mappings(), 1);
    CHECK_OK(aclrtDestroyStream(stream));
    CHECK_OK(aclrtFree(got));
}

static void owner(uint8_t *const *mine)
{
    CHECK(all_are(mine[HIDDEN], bytes, HIDDEN));
    CHECK(all_are(mine[READABLE], bytes, READABLE));
    CHECK(all_are(mine[SHOWN], 4096, 0x77) && all_are(mine[SHOWN] + 4096, bytes - 4096, SHOWN));
}

static void shown(uint32_t rank, int other)
{
    HcclComm comm = new_one_sided("shown", rank);
    void *handles[REGIONS] = { NULL };
    uint8_t *mine[REGIONS], *theirs[REGIONS];
    int before = 0;
    for (int i = 0; rank == 0 && i < REGIONS; i++) {
        void *got;
        CHECK_OK(aclrtMalloc(&got, bytes, ACL_MEM_MALLOC_NORMAL_ONLY));
        mine[i] = got;
        memset(mine[i], i, bytes);
        handles[i] = bind_memory(comm, COMM_MEM_TYPE_DEVICE, got, bytes);
        CHECK_EQ(softnpu_comm_show(comm, handles[i], 2), -1);
        CHECK_EQ(softnpu_comm_show(comm, handles[i], SHOW_NOTHING), 0);
        CHECK_EQ(softnpu_comm_show(comm, handles[i], shows[i]), 0);
    }
    CHECK_EQ(softnpu_comm_show(comm, NULL, SHOW_ALL), -1);
    CHECK_EQ(softnpu_comm_show(NULL, handles[0], SHOW_ALL), -1);
    before = open_descriptors();
    CHECK_OK(prepare(comm, 20));
    tell(other, mine, sizeof mine);
    hear(other, theirs, sizeof theirs);
    if (rank == 1)
        peer(comm, theirs);
    in_step(other);
    if (rank == 0) {
        owner(mine);
        CHECK(open_descriptors() - before <= 3);            /* the link and its channels; no file that was opened to be sent */
        CHECK_EQ(softnpu_comm_show(comm, handles[0], SHOW_ALL), -1);
    }
    for (int i = 0; rank == 0 && i < REGIONS; i++)
        CHECK_OK(HcclCommUnbindMem(comm, handles[i]));
    CHECK_OK(HcclCommDestroy(comm));
    for (int i = 0; rank == 0 && i < REGIONS; i++) {
        CHECK_OK(HcclDeregisterGlobalMem(handles[i]));
        CHECK_OK(aclrtFree(mine[i]));
    }
}

TEST(test_a_peer_reaches_what_it_is_shown)
{
    run_pair(shown);
}

int main(void)
{
    RUN(test_a_peer_reaches_what_it_is_shown);
    return check_done();
}
