/* The communicator object. Its handle is a number that is looked up; tasks and blocked calls hold references to the object.
 *
 *     new ---> published ---> closed ---> destroyed
 *
 * closed: HcclCommDestroy has begun, links are hung up, nothing starts any longer. destroyed: it has succeeded, the handle is
 * gone, and memory and sockets go with the last reference.                                                               */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>
#include "hccl_queue_pair.h"
#include "hccl_unfold.h"

static pthread_mutex_t names_lock = PTHREAD_MUTEX_INITIALIZER;
static hccl_comm *named;                                /* live one-sided ones: their names are unique per device */

static void close_if_open(int fd)
{
    if (fd >= 0)
        close(fd);
}

static void comm_free(soft_object *object)
{
    hccl_comm *comm = (hccl_comm *)object;
    for (uint32_t rank = 0; rank < comm->size; rank++) {
        hccl_peer *peer = &comm->peers[rank];
        hccl_queue_pair_put(peer->queue_pair);
        hccl_remotes_clear(&peer->remotes);
        hccl_gate_unmap(peer->gate);
        close_if_open(peer->link);
        close_if_open(peer->process);
        close_if_open(peer->send.fd);
        close_if_open(peer->recv.fd);
    }
    hccl_unfolding_put(comm->unfolding);
    close_if_open(comm->watch);
    hccl_strict_port_give(comm);
    if (comm->world)
        hccl_strict_world_give(comm->device);
    pthread_mutex_destroy(&comm->lock);
    free(comm->hidden.item);
    free(comm->readable.item);
    free(comm);
}

hccl_comm *hccl_comm_new(uint32_t size, uint32_t rank, const hccl_config *config, const hccl_key *key)
{
    hccl_comm *comm = calloc(1, sizeof *comm + size * sizeof comm->peers[0]);
    if (!comm)
        return NULL;
    comm->object.destroy = comm_free;
    atomic_init(&comm->object.refs, 1);
    pthread_mutex_init(&comm->lock, NULL);
    comm->key = *key;
    memcpy(comm->name, config->name, HCCL_NAME_BYTES);
    comm->traffic_class = config->traffic_class;
    comm->service_level = config->service_level;
    comm->unfolds = config->unfolds;
    comm->device = soft_current_device();
    comm->rank = rank;
    comm->size = size;
    comm->cancel = comm->watch = -1;
    for (uint32_t i = 0; i < size; i++) {
        hccl_peer *peer = &comm->peers[i];
        peer->link = peer->process = peer->send.fd = peer->recv.fd = -1;
        atomic_init(&peer->send.busy, false);
        atomic_init(&peer->recv.busy, false);
    }
    return comm;
}

/* Under names_lock. */
static bool name_is_taken(const hccl_comm *comm)
{
    for (const hccl_comm *other = named; other; other = other->next)
        if (other->device == comm->device && !strcmp(other->name, comm->name))
            return true;
    return false;
}

void hccl_comm_forget(const hccl_comm *comm)
{
    pthread_mutex_lock(&names_lock);
    for (hccl_comm **at = &named; *at; at = &(*at)->next)
        if (*at == comm) {
            *at = comm->next;
            break;
        }
    pthread_mutex_unlock(&names_lock);
}

HcclResult hccl_comm_publish(const char *function, hccl_comm *comm, HcclComm *handle)
{
    HcclResult code = HCCL_SUCCESS;
    pthread_mutex_lock(&names_lock);
    if (comm->one_sided && name_is_taken(comm))
        code = soft_hccl_error(HCCL_E_PARA, "%s: device %d already has a one-sided communicator named \"%s\"", function,
                               comm->device, comm->name);
    soft_ref(&comm->object);                            /* ours, while the handle may already be found and destroyed */
    if (!code && !(comm->handle = soft_handle_new(SOFT_COMM, &comm->object)))
        code = soft_hccl_error(HCCL_E_MEMORY, "%s: no room for another communicator", function);
    if (!code && comm->one_sided) {
        comm->next = named;
        named = comm;
    }
    pthread_mutex_unlock(&names_lock);
    if (code)
        hccl_comm_put(comm);
    else
        *handle = comm->handle;
    hccl_comm_put(comm);
    return code;
}

HcclResult hccl_comm_find(const char *function, HcclComm handle, hccl_comm **comm)
{
    if (!handle)
        return soft_hccl_error(HCCL_E_PTR, "%s: comm is NULL", function);
    *comm = soft_handle_get(SOFT_COMM, handle);
    if (!*comm)
        return soft_hccl_error(HCCL_E_NOT_FOUND, "%s: %p is not a communicator, or no longer", function, handle);
    return HCCL_SUCCESS;
}

void hccl_comm_put(hccl_comm *comm)
{
    soft_unref(&comm->object);
}

HcclResult hccl_comm_hold(const char *function, hccl_comm *comm)
{
    pthread_mutex_lock(&comm->lock);
    bool closed = comm->closed, suspended = comm->suspended;
    if (!closed && !suspended)
        comm->tasks++;
    pthread_mutex_unlock(&comm->lock);
    if (closed)
        return soft_hccl_error(HCCL_E_NOT_FOUND, "%s: the communicator was destroyed", function);
    if (suspended)
        return soft_hccl_error(HCCL_E_SUSPENDING, "%s: the communicator is suspended", function);
    return HCCL_SUCCESS;
}

void hccl_comm_release(hccl_comm *comm)
{
    pthread_mutex_lock(&comm->lock);
    comm->tasks--;
    pthread_mutex_unlock(&comm->lock);
}

HcclResult hccl_setup_begin(hccl_comm *comm, hccl_wait *wait)
{
    int cancel = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (cancel < 0)
        return soft_hccl_error(HCCL_E_SYSCALL, "%s: eventfd: %s", wait->function, strerror(errno));
    pthread_mutex_lock(&comm->lock);
    bool closed = comm->closed, busy = comm->setting_up;
    if (!closed && !busy) {
        comm->setting_up = true;
        comm->cancel = wait->cancel = cancel;
        if (comm->called_off)
            eventfd_write(cancel, 1);
    }
    pthread_mutex_unlock(&comm->lock);
    if (!closed && !busy)
        return HCCL_SUCCESS;
    close(cancel);
    if (closed)
        return soft_hccl_error(HCCL_E_NOT_FOUND, "%s: the communicator was destroyed", wait->function);
    return soft_hccl_error(HCCL_E_AGAIN, "%s: another thread is setting this communicator up", wait->function);
}

HcclResult hccl_setup_end(hccl_comm *comm, hccl_wait *wait, HcclResult code)
{
    pthread_mutex_lock(&comm->lock);
    comm->setting_up = false;
    comm->cancel = -1;
    bool closed = comm->closed;
    pthread_mutex_unlock(&comm->lock);
    close(wait->cancel);
    if (!closed)
        return code;
    return soft_hccl_error(HCCL_E_NOT_FOUND, "%s: the communicator was destroyed by another thread", wait->function);
}

int softnpu_comm_cancel(void *handle)
{
    hccl_comm *comm = handle && !softnpu_strictness() ? soft_handle_get(SOFT_COMM, handle) : NULL;
    if (!comm)
        return -1;
    pthread_mutex_lock(&comm->lock);
    comm->called_off = true;
    if (comm->cancel >= 0)
        eventfd_write(comm->cancel, 1);
    pthread_mutex_unlock(&comm->lock);
    hccl_comm_put(comm);
    return 0;
}
