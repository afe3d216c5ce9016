/* HcclCommInitAll: one process, many devices. The ranks need not look for each other: the sockets are made in pairs. */
#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#include "hccl_soft.h"

static HcclResult check_devices(const char *function, uint32_t count, const int32_t *devices)
{
    uint64_t seen = 0;
    if (count < 1 || count > HCCL_RANKS_MAX)
        return soft_hccl_error(HCCL_E_PARA, "%s: %u devices: must be 1 to %d", function, count, HCCL_RANKS_MAX);
    for (uint32_t i = 0; i < count; i++) {
        if (devices[i] < 0 || devices[i] >= soft_device_count())
            return soft_hccl_error(HCCL_E_PARA, "%s: there is no device %d", function, devices[i]);
        if (devices[i] < 64 && seen >> devices[i] & 1)
            return soft_hccl_error(HCCL_E_PARA, "%s: device %d is named twice", function, devices[i]);
        if (devices[i] < 64)
            seen |= (uint64_t)1 << devices[i];
    }
    return HCCL_SUCCESS;
}

static HcclResult join(const char *function, hccl_comm *low, hccl_comm *high)
{
    int fds[6] = {-1, -1, -1, -1, -1, -1}, shared = hccl_gate_new();
    hccl_gate *low_gate = shared < 0 ? NULL : hccl_gate_map(shared), *high_gate = low_gate ? hccl_gate_map(shared) : NULL;
    if (shared >= 0)
        close(shared);
    if (high_gate && socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds) == 0
        && socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds + 2) == 0
        && socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds + 4) == 0) {
        const int low_channels[2] = {fds[2], fds[4]}, high_channels[2] = {fds[5], fds[3]};   /* send, receive */
        HcclResult code = hccl_mesh_install(low, high->rank, fds[0], getpid(), low_gate, low_channels);
        HcclResult other = hccl_mesh_install(high, low->rank, fds[1], getpid(), high_gate, high_channels);
        return code ? code : other;
    }
    HcclResult code = soft_hccl_error(HCCL_E_SYSCALL, "%s: two sockets and a page for a pair of ranks: %s", function,
                                     strerror(errno));
    hccl_gate_unmap(low_gate);
    hccl_gate_unmap(high_gate);
    for (int i = 0; i < 6; i++)
        if (fds[i] >= 0)
            close(fds[i]);
    return code;
}

static HcclResult make_all(const char *function, uint32_t count, const int32_t *devices, hccl_comm **made)
{
    static _Atomic uint64_t serial;
    struct { uint64_t number; pid_t pid; } __attribute__((packed)) self = {atomic_fetch_add(&serial, 1), getpid()};
    hccl_key key = {{3, 0}};
    hccl_config config;
    HcclResult code = hccl_config_read(function, NULL, &config);
    if (code)
        return code;
    strcpy(config.name, "softnpu-all");
    hccl_key_add(&key, &self, sizeof self);
    for (uint32_t i = 0; i < count; i++) {
        made[i] = hccl_comm_new(count, i, &config, &key);
        if (!made[i])
            return soft_hccl_error(HCCL_E_MEMORY, "%s: out of memory", function);
        made[i]->device = devices[i];
        for (uint32_t low = 0; !code && low < i; low++)
            code = join(function, made[low], made[i]);
        if (code)
            return code;
    }
    return HCCL_SUCCESS;
}

static HcclResult publish_all(const char *function, uint32_t count, hccl_comm **made, HcclComm *comms)
{
    HcclComm handles[HCCL_RANKS_MAX];
    for (uint32_t i = 0; i < count; i++) {
        HcclResult code = hccl_comm_publish(function, made[i], &handles[i]);
        made[i] = NULL;
        if (!code)
            continue;
        while (i-- > 0)
            HcclCommDestroy(handles[i]);
        return code;
    }
    memcpy(comms, handles, count * sizeof *comms);
    return HCCL_SUCCESS;
}

HcclResult HcclCommInitAll(uint32_t ndev, int32_t *devices, HcclComm *comms)
{
    hccl_comm *made[HCCL_RANKS_MAX] = {NULL};
    HCCL_ENTER();
    if (!devices || !comms)
        return soft_hccl_error(HCCL_E_PTR, "%s: %s is NULL", __func__, devices ? "comms" : "devices");
    HcclResult code = check_devices(__func__, ndev, devices);
    if (!code)
        code = make_all(__func__, ndev, devices, made);
    if (!code)
        code = publish_all(__func__, ndev, made, comms);
    for (uint32_t i = 0; i < HCCL_RANKS_MAX; i++)
        if (made[i])
            hccl_comm_put(made[i]);
    return code;
}
