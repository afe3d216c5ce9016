/* hccl_pair.h: two ranks in two processes, for the tests of softnpu's HCCL half.
 *
 *   run_pair(body)      forks rank 0 and rank 1; each opens its device and runs body(rank, other), where `other` is a
 *                       socket to the other rank (tell, hear, in_step). The test's own process never opens anything.
 *   run_mortals(body)   the same, but rank 1 must end by SIGKILL                                                    */
#pragma once
#include <dirent.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <time.h>
#include "bytes.h"
#include "check.h"
#include "hccl.h"

typedef void rank_body(uint32_t rank, int other);

static inline void open_device(int32_t device)
{
    CHECK_OK(aclInit(NULL));
    CHECK_OK(aclrtSetDevice(device));
}

static inline void close_device(int32_t device)
{
    softnpu_counters left;
    softnpu_get_counters(&left);
    CHECK_EQ(left.comms, 0);
    CHECK_EQ(left.imported, 0);
    CHECK_EQ(left.adopted, 0);
    CHECK_OK(aclrtResetDevice(device));
    CHECK_OK(aclFinalize());
}

static inline pid_t fork_rank(rank_body *body, uint32_t rank, const int pair[2])
{
    fflush(stdout);
    pid_t pid = fork();
    if (pid)
        return pid;
    close(pair[1 - rank]);
    check_failures = 0;                                     /* the parent's are not ours to report */
    setenv("HCCL_NPU_SOCKET_PORT_RANGE", "auto", 0);        /* other tests' processes listen on these devices, too */
    int32_t device = getenv("SOFTNPU_STRICT") ? (int32_t)rank : 0;      /* HCCL compares it with the table's */
    open_device(device);
    body(rank, pair[rank]);
    close_device(device);
    exit(check_failures ? 1 : 0);                           /* not _exit: a leak checker looks for leaks at exit */
}

static inline void run_ranks(rank_body *body, bool mortal)
{
    int pair[2], status[2] = { -1, -1 };
    pid_t pids[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair))
        abort();
    for (uint32_t rank = 0; rank < 2; rank++)
        pids[rank] = fork_rank(body, rank, pair);
    close(pair[0]);
    close(pair[1]);
    for (int rank = 0; rank < 2; rank++)
        waitpid(pids[rank], &status[rank], 0);
    CHECK(WIFEXITED(status[0]) && WEXITSTATUS(status[0]) == 0);
    if (mortal)
        CHECK(WIFSIGNALED(status[1]) && WTERMSIG(status[1]) == SIGKILL);
    else
        CHECK(WIFEXITED(status[1]) && WEXITSTATUS(status[1]) == 0);
}

static inline void run_pair(rank_body *body)
{
    run_ranks(body, false);
}

static inline void run_mortals(rank_body *body)
{
    run_ranks(body, true);
}

/* Returns when both ranks have come here. */
static inline void in_step(int other)
{
    char token = 's';
    tell(other, &token, 1);
    hear(other, &token, 1);
}

static inline int open_descriptors(void)
{
    int count = 0;
    DIR *folder = opendir("/proc/self/fd");
    while (folder && readdir(folder))
        count++;
    if (folder)
        closedir(folder);
    /* with the folder itself and two dots: only differences matter */
    return count;
}

static inline double seconds_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* ---- communicators ---- */

static const char two_ranks[] =
    "{\"version\": \"1.0\", \"status\": \"completed\", \"server_count\": \"1\", \"server_list\": ["
    "{\"server_id\": \"127.0.0.1\", \"device\": ["
    "{\"device_id\": \"0\", \"device_ip\": \"10.0.0.1\", \"rank_id\": \"0\"}, "
    "{\"device_id\": \"1\", \"device_ip\": \"10.0.0.2\", \"rank_id\": \"1\"}]}]}";

static uint32_t expansion_mode;                              /* hcclOpExpansionMode of what is made from here on */

static inline HcclCommConfig named_config(const char *name)
{
    HcclCommConfig config;
    uint64_t size = 300;
    uint32_t head[2] = { HCCL_COMM_CONFIG_MAGIC_WORD, 5 };
    memset(&config, 0, sizeof config);
    memcpy(config.reserved, &size, sizeof size);
    memcpy(config.reserved + 8, head, sizeof head);
    config.hcclOpExpansionMode = expansion_mode;
    strncpy(config.hcclCommName, name, sizeof config.hcclCommName - 1);
    return config;
}

/* Names must not meet those of another run of the tests on this machine. The ranks' parent tells runs apart. */
static inline HcclComm new_one_sided(const char *name, uint32_t rank)
{
    char unique[100];
    HcclComm comm = NULL;
    snprintf(unique, sizeof unique, "%s-%d", name, getppid());
    HcclCommConfig config = named_config(unique);
    CHECK_OK(HcclCommInitClusterInfoMemConfig(two_ranks, rank, &config, &comm));
    return comm;
}

static inline HcclResult prepare(HcclComm comm, int timeout)
{
    HcclPrepareConfig config = { HCCL_TOPO_FULLMESH, 0, 0, 0 };
    return HcclCommPrepare(comm, &config, timeout);
}

static inline void *bind_memory(HcclComm comm, CommMemType type, void *addr, uint64_t size)
{
    CommMem mem = { type, addr, size };
    void *handle = NULL;
    CHECK_OK(HcclRegisterGlobalMem(&mem, &handle));
    CHECK_OK(HcclCommBindMem(comm, handle));
    return handle;
}

static inline HcclComm new_two_sided(uint32_t rank, int other)
{
    HcclRootInfo info;
    HcclComm comm = NULL;
    if (rank == 0) {
        CHECK_OK(HcclGetRootInfo(&info));
        tell(other, &info, sizeof info);
    } else {
        hear(other, &info, sizeof info);
    }
    CHECK_OK(HcclCommInitRootInfo(2, &info, rank, &comm));
    return comm;
}

static inline aclrtStream new_stream(void)
{
    aclrtStream stream = NULL;
    CHECK_OK(aclrtCreateStream(&stream));
    return stream;
}
