/* SOFTNPU_STRICT: processes listen on ports of their device's network adapter, and two processes on one device cannot both listen on
 * one: the second's communicator is HCCL_E_UNAVAIL (EI0020). The port is the table's device_port, or 16666, unless
 * HCCL_NPU_SOCKET_PORT_RANGE lets each process look for one that is free. A process listens once, for all its communicators.
 * Here the adapter is this machine's kernel, and the port an abstract socket name. [src hcomm adapter_hccp.cc, EI0020] */
#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
#include "hccl_soft.h"

enum { DEFAULT_PORT = 16666, PORTS_MAX = 256 };

typedef struct hccl_adapter_port { int device, fd; uint32_t port, users; } adapter_port;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static adapter_port ports[PORTS_MAX];                   /* free: users is 0 */

/* Locked. The one that this process listens on, or a free entry, or NULL. */
static adapter_port *find(int device, uint32_t port)
{
    adapter_port *vacant = NULL;
    for (adapter_port *at = ports; at < ports + PORTS_MAX; at++)
        if (at->users && at->device == device && at->port == port)
            return at;
        else if (!at->users && !vacant)
            vacant = at;
    return vacant;
}

static int listen_on(int device, uint32_t port)
{
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    int length = snprintf(address.sun_path + 1, sizeof address.sun_path - 1, "softnpu-%u-device-%d-port-%u", geteuid(), device, port);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || bind(fd, (struct sockaddr *)&address, (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length)) == 0)
        return fd;
    close(fd);
    return -1;
}

static adapter_port *take(int device, uint32_t port)
{
    pthread_mutex_lock(&lock);
    adapter_port *entry = find(device, port);
    if (entry && !entry->users) {
        *entry = (adapter_port){ device, listen_on(device, port), port, 0 };
        entry = entry->fd < 0 ? NULL : entry;
    }
    if (entry)
        entry->users++;
    pthread_mutex_unlock(&lock);
    return entry;
}

HcclResult hccl_strict_port_take(const char *function, hccl_comm *comm, uint32_t port)
{
    const char *range = getenv("HCCL_NPU_SOCKET_PORT_RANGE");
    if (!soft_is_strict() || (range && *range))
        return HCCL_SUCCESS;
    port = port ? port : DEFAULT_PORT;
    comm->port = take(comm->device, port);
    if (comm->port)
        return HCCL_SUCCESS;
    return soft_hccl_error(HCCL_E_UNAVAIL, "%s: another process listens on port %u of device %d: set HCCL_NPU_SOCKET_PORT_RANGE, or "
                           "another device_port in its rank tables", function, port, comm->device);
}

void hccl_strict_port_give(hccl_comm *comm)
{
    adapter_port *entry = comm->port;
    comm->port = NULL;
    if (!entry)
        return;
    pthread_mutex_lock(&lock);
    if (--entry->users == 0)
        close(entry->fd);
    pthread_mutex_unlock(&lock);
}
