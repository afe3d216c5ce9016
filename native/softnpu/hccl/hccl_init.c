/* The ways to make a communicator. All but the one-sided one meet their peers before they return. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>
#include "hccl_soft.h"

static const char root_magic[8] = "softroot";
typedef struct root { char magic[8]; uint64_t token[2]; } root;   /* how the 4108 bytes begin; the rest is zero */

static HcclResult need_device(const char *function)
{
    if (soft_current_device() >= 0)
        return HCCL_SUCCESS;
    return soft_hccl_error(HCCL_E_RUNTIME, "%s: this thread has no device; call aclrtSetDevice first", function);
}

static HcclResult check_ranks(const char *function, uint32_t ranks, uint32_t rank)
{
    if (ranks >= 1 && ranks <= HCCL_RANKS_MAX && rank < ranks)
        return HCCL_SUCCESS;
    return soft_hccl_error(HCCL_E_PARA, "%s: rank %u of %u: there must be 1 to %d ranks, and the rank below their number", function, rank, ranks,
                           HCCL_RANKS_MAX);
}

/* Every rank has every other, and knows it: otherwise one rank may believe in a communicator that another has given up. */
static HcclResult meet(hccl_comm *comm, const hccl_wait *wait)
{
    HcclResult code = hccl_mesh_connect(comm, wait, -1);
    for (uint32_t rank = 0; !code && rank < comm->size; rank++)
        if (rank != comm->rank)
            code = hccl_wait_failed(wait, rank, hccl_message_confirm(wait, comm->peers[rank].link, HCCL_SUCCESS));
    return code;
}

static HcclResult init_comm(const char *function, uint32_t ranks, uint32_t rank, hccl_config *config,
                            const hccl_key *key, HcclComm *out)
{
    hccl_wait wait = {function, 0, -1};
    HcclResult code = hccl_connect_deadline(function, 0, &wait.deadline);
    if (code)
        return code;
    if (!*config->name)
        snprintf(config->name, sizeof config->name, "softnpu-%016llx", (unsigned long long)(key->word[0] ^ key->word[1]));
    hccl_comm *comm = hccl_comm_new(ranks, rank, config, key);
    if (!comm)
        return soft_hccl_error(HCCL_E_MEMORY, "%s: out of memory", function);
    if (config->world)
        code = hccl_strict_world_take(function, comm->device);
    comm->world = config->world && !code;
    if (!code)
        code = hccl_strict_port_take(function, comm, config->port);
    if (!code)
        code = meet(comm, &wait);
    if (!code)
        return hccl_comm_publish(function, comm, out);
    hccl_comm_put(comm);
    return code;
}

/* ---- root info ---- */

static HcclResult new_root(const char *function, root *made)
{
    memcpy(made->magic, root_magic, sizeof root_magic);
    if (getrandom(made->token, sizeof made->token, 0) == sizeof made->token)
        return HCCL_SUCCESS;
    return soft_hccl_error(HCCL_E_SYSCALL, "%s: getrandom: %s", function, strerror(errno));
}

HcclResult HcclGetRootInfo(HcclRootInfo *rootInfo)
{
    root made;
    HCCL_ENTER();
    if (!rootInfo)
        return soft_hccl_error(HCCL_E_PTR, "%s: rootInfo is NULL", __func__);
    HcclResult code = need_device(__func__);
    if (!code)
        code = new_root(__func__, &made);
    if (code)
        return code;
    memset(rootInfo, 0, sizeof *rootInfo);
    memcpy(rootInfo->internal, &made, sizeof made);
    return HCCL_SUCCESS;
}

static HcclResult init_root(const char *function, uint32_t ranks, const HcclRootInfo *info, uint32_t rank,
                            const HcclCommConfig *given, HcclComm *comm)
{
    root from;
    hccl_config config;
    hccl_key key = {{0, 0}};
    if (!info || !comm)
        return soft_hccl_error(HCCL_E_PTR, "%s: %s is NULL", function, info ? "comm" : "rootInfo");
    HcclResult code = hccl_config_read(function, given, &config);
    if (!code)
        code = check_ranks(function, ranks, rank);
    if (!code)
        code = need_device(function);
    if (code)
        return code;
    memcpy(&from, info->internal, sizeof from);
    if (memcmp(from.magic, root_magic, sizeof root_magic))
        return soft_hccl_error(HCCL_E_PARA, "%s: rootInfo did not come from HcclGetRootInfo", function);
    hccl_key_add(&key, &from, sizeof from);
    return init_comm(function, ranks, rank, &config, &key, comm);
}

HcclResult HcclCommInitRootInfo(uint32_t nRanks, const HcclRootInfo *rootInfo, uint32_t rank, HcclComm *comm)
{
    HCCL_ENTER();
    return init_root(__func__, nRanks, rootInfo, rank, NULL, comm);
}

HcclResult HcclCommInitRootInfoConfig(uint32_t nRanks, const HcclRootInfo *rootInfo, uint32_t rank,
                                      const HcclCommConfig *config, HcclComm *comm)
{
    HCCL_ENTER();
    if (!config)
        return soft_hccl_error(HCCL_E_PTR, "%s: config is NULL", __func__);
    return init_root(__func__, nRanks, rootInfo, rank, config, comm);
}

/* ---- rank tables ---- */

static HcclResult read_table(const char *function, const char *path, char **text, size_t *length)
{
    struct stat file;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return soft_hccl_error(HCCL_E_OPEN_FILE_FAILURE, "%s: %s: %s", function, path, strerror(errno));
    bool usable = fstat(fd, &file) == 0 && S_ISREG(file.st_mode) && file.st_size <= HCCL_TABLE_BYTES;
    ssize_t got = usable && (*text = malloc(HCCL_TABLE_BYTES)) ? read(fd, *text, HCCL_TABLE_BYTES) : -1;
    close(fd);
    if (!usable)
        return soft_hccl_error(HCCL_E_PARA, "%s: %s is not a file of at most %u bytes", function, path, HCCL_TABLE_BYTES);
    if (got < 0)
        return free(*text), soft_hccl_error(HCCL_E_OPEN_FILE_FAILURE, "%s: %s cannot be read", function, path);
    *length = (size_t)got;
    return HCCL_SUCCESS;
}

static HcclResult init_table(const char *function, const char *path, uint32_t rank, const HcclCommConfig *given,
                             HcclComm *comm)
{
    char *text = NULL;
    size_t length = 0;
    hccl_place place;
    hccl_config config;
    hccl_key key = {{1, 0}};
    if (!path || !comm)
        return soft_hccl_error(HCCL_E_PTR, "%s: %s is NULL", function, path ? "comm" : "clusterInfo");
    HcclResult code = hccl_config_read(function, given, &config);
    if (!code)
        code = need_device(function);
    if (!code)
        code = read_table(function, path, &text, &length);
    if (code)
        return code;
    hccl_key_add(&key, config.name, strlen(config.name) + 1);
    code = hccl_rank_table(function, text, length, rank, &place, &key);
    free(text);
    config.world = true;
    config.port = place.port;
    return code ? code : init_comm(function, place.ranks, rank, &config, &key, comm);
}

HcclResult HcclCommInitClusterInfo(const char *clusterInfo, uint32_t rank, HcclComm *comm)
{
    HCCL_ENTER();
    return init_table(__func__, clusterInfo, rank, NULL, comm);
}

HcclResult HcclCommInitClusterInfoConfig(const char *clusterInfo, uint32_t rank, HcclCommConfig *config, HcclComm *comm)
{
    HCCL_ENTER();
    if (!config)
        return soft_hccl_error(HCCL_E_PTR, "%s: config is NULL", __func__);
    return init_table(__func__, clusterInfo, rank, config, comm);
}

static HcclResult init_one_sided(const char *function, const char *rankTableString, uint32_t rank, HcclCommConfig *config,
                                 HcclComm *comm)
{
    hccl_config read;
    hccl_place place;
    hccl_key key = {{2, 0}};
    HCCL_ENTER_AS(function, NULL);
    if (!rankTableString || !config || !comm)
        return soft_hccl_error(HCCL_E_PTR, "%s: rankTableString, config or comm is NULL", function);
    HcclResult code = need_device(function);
    if (!code)
        code = hccl_config_read(function, config, &read);
    if (code)
        return code;
    if (!*read.name)
        return soft_hccl_error(HCCL_E_PARA, "%s: config gives no hcclCommName", function);
    size_t length = strnlen(rankTableString, HCCL_TABLE_BYTES);
    if (length == HCCL_TABLE_BYTES)
        return soft_hccl_error(HCCL_E_PARA, "%s: the rank table is longer than %u bytes", function, HCCL_TABLE_BYTES);
    hccl_key_add(&key, read.name, strlen(read.name) + 1);
    code = hccl_rank_table(function, rankTableString, length, rank, &place, &key);
    if (code)
        return code;
    hccl_comm *made = hccl_comm_new(place.ranks, rank, &read, &key);
    if (!made)
        return soft_hccl_error(HCCL_E_MEMORY, "%s: out of memory", function);
    made->one_sided = true;
    code = hccl_strict_port_take(function, made, place.port);
    if (code)
        return hccl_comm_put(made), code;
    return hccl_comm_publish(function, made, comm);
}

/* The one-sided kind: ranks do not meet before HcclCommPrepare. */
HcclResult HcclCommInitClusterInfoMemConfig(const char *rankTableString, uint32_t rank, HcclCommConfig *config,
                                            HcclComm *comm)
{
    HcclResult code = hccl_strict_init_enter(__func__);
    if (code)
        return code;
    code = init_one_sided(__func__, rankTableString, rank, config, comm);
    hccl_strict_init_leave();
    return code;
}
