/* The end of a communicator. HcclCommDestroy promises what a NIC does when its queue pairs are torn down: no byte of a peer
 * lands here after it. Where it cannot promise that yet, because a peer was stopped in the middle of a piece, it says E_AGAIN:
 * the communicator is closed and does nothing any longer, but exists until the peer came out, hung up or ended. A file
 * descriptor (softnpu_comm_awaited) becomes readable then.                                                               */
#include <errno.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "hccl_queue_pair.h"
#include "hccl_unfold.h"

#define PATIENCE_NS  ((int64_t)100000000)               /* a peer that runs comes out of its piece much sooner */
#define NOT_A_RANK   UINT32_MAX
#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif
#ifndef SYS_pidfd_open                                  /* Linux 5.3; older C libraries do not name it */
#define SYS_pidfd_open 434
#endif

/* The link is half closed: the peer sees that we left, and we still see when it leaves. */
static void hang_up(hccl_comm *comm)
{
    for (uint32_t rank = 0; rank < comm->size; rank++) {
        hccl_peer *peer = &comm->peers[rank];
        if (peer->gate)
            hccl_gate_shut(peer->gate);
        if (peer->link >= 0)
            shutdown(peer->link, SHUT_WR);
        if (peer->send.fd >= 0)
            shutdown(peer->send.fd, SHUT_RDWR);
        if (peer->recv.fd >= 0)
            shutdown(peer->recv.fd, SHUT_RDWR);
    }
}

/* -1 where the kernel has none. Exact since Linux 6.5; before it, a child of the peer's may keep the link open after a death
 * whose number was given to another process since, which must then end, too.                                           */
static int process_of(const hccl_peer *peer)
{
    int fd;
    socklen_t length = sizeof fd;
    if (getsockopt(peer->link, SOL_SOCKET, SO_PEERPIDFD, &fd, &length) == 0)
        return fd;
    return peer->pid > 0 ? (int)syscall(SYS_pidfd_open, peer->pid, 0) : -1;
}

static bool has_ended(const hccl_peer *peer)
{
    struct pollfd state = {peer->process, POLLIN, 0};
    return peer->process >= 0 && poll(&state, 1, 0) > 0;
}

/* It hangs up only outside of a piece, and a process whose last thread is gone hangs up, too. */
static bool may_write(const hccl_comm *comm, uint32_t rank)
{
    const hccl_peer *peer = &comm->peers[rank];
    return peer->gate && hccl_gate_busy(peer->gate, !hccl_side(comm, rank)) && hccl_socket_alive(peer->link)
        && !has_ended(peer);
}

static bool watch_for(int watch, int fd, uint32_t events)
{
    struct epoll_event event = {.events = events};
    return epoll_ctl(watch, EPOLL_CTL_ADD, fd, &event) == 0 || errno == EEXIST;
}

/* Under the lock. The first rank that may still write, which is watched from here on; NOT_A_RANK: there is none. */
static uint32_t find_writer(hccl_comm *comm)
{
    uint32_t first = NOT_A_RANK;
    for (uint32_t rank = 0; rank < comm->size; rank++) {
        hccl_peer *peer = &comm->peers[rank];
        if (!may_write(comm, rank))
            continue;
        if (peer->process < 0)
            peer->process = process_of(peer);
        if (comm->watch < 0)
            comm->watch = epoll_create1(EPOLL_CLOEXEC);
        if (comm->watch >= 0 && (!watch_for(comm->watch, peer->link, EPOLLRDHUP)
                                 || (peer->process >= 0 && !watch_for(comm->watch, peer->process, EPOLLIN)))) {
            close(comm->watch);
            comm->watch = -1;
        }
        if (first == NOT_A_RANK && may_write(comm, rank))   /* it may have come out before it was watched */
            first = rank;
    }
    return first;
}

/* For a moment: nearly always the peer is running, and comes out of its piece by itself. */
static uint32_t await_writers(hccl_comm *comm)
{
    for (int64_t end = soft_now_ns() + PATIENCE_NS;;) {
        pthread_mutex_lock(&comm->lock);
        uint32_t writer = find_writer(comm);
        int watch = comm->watch;
        pthread_mutex_unlock(&comm->lock);
        int64_t left = end - soft_now_ns();
        if (writer == NOT_A_RANK || watch < 0 || left <= 0)
            return writer;
        struct epoll_event event;
        epoll_wait(watch, &event, 1, (int)(left / 1000000) + 1);
    }
}

/* Under the lock. */
static HcclResult close_comm(const char *function, hccl_comm *comm)
{
    if (comm->destroyed)
        return soft_hccl_error(HCCL_E_NOT_FOUND, "%s: another thread destroyed it first", function);
    if (comm->tasks)
        return soft_hccl_error(HCCL_E_AGAIN, "%s: transfers of this communicator are queued or running", function);
    if (!comm->closed) {
        comm->closed = true;
        if (comm->cancel >= 0)
            eventfd_write(comm->cancel, 1);
        for (uint32_t rank = 0; rank < comm->size; rank++)
            hccl_queue_pair_end(comm->peers[rank].queue_pair);
        hang_up(comm);
    }
    return HCCL_SUCCESS;
}

/* Bindings end here and not with the last reference: memory may be deregistered as soon as HcclCommDestroy has returned. */
static HcclResult end_comm(const char *function, hccl_comm *comm)
{
    pthread_mutex_lock(&comm->lock);
    bool first = !comm->destroyed;
    comm->destroyed = true;
    if (first) {
        hccl_mesh_break(comm, -1);
        hccl_strict_port_give(comm);
        if (comm->world)
            hccl_strict_world_give(comm->device);
        comm->world = false;
        hccl_regions_clear(&comm->bound, false);
        for (uint32_t rank = 0; rank < comm->size; rank++)
            hccl_regions_clear(&comm->peers[rank].offered, true);
    }
    pthread_mutex_unlock(&comm->lock);
    return first ? HCCL_SUCCESS : soft_hccl_error(HCCL_E_NOT_FOUND, "%s: another thread destroyed it first", function);
}

/* The vendor's call launches a kernel on the communicator's own stream, and waits for it. [src
 * hccl_one_sided_service.cc:596-606] */
static hccl_unfolding *await_unfolded(hccl_comm *comm)
{
    pthread_mutex_lock(&comm->lock);
    hccl_unfolding *unfolding = comm->unfolding;
    if (unfolding)
        soft_ref((soft_object *)unfolding);
    pthread_mutex_unlock(&comm->lock);
    hccl_unfolding_drain(unfolding);
    return unfolding;
}

static HcclResult destroy(const char *function, hccl_comm *comm)
{
    hccl_unfolding *unfolding = await_unfolded(comm);
    pthread_mutex_lock(&comm->lock);
    HcclResult code = close_comm(function, comm);
    pthread_mutex_unlock(&comm->lock);
    if (!code)
        hccl_unfolding_end(unfolding);
    hccl_unfolding_put(unfolding);
    if (code)
        return code;
    uint32_t writer = await_writers(comm);
    if (writer != NOT_A_RANK)
        return soft_hccl_error(HCCL_E_AGAIN, "%s: rank %u (process %d) stopped in the middle of writing into memory of this "
                               "process; has that process been suspended?", function, writer,
                               comm->peers[writer].pid);
    return end_comm(function, comm);
}

static HcclResult destroy_one_sided(const char *function, hccl_comm *comm)
{
    HcclResult code = hccl_strict_destroy_enter(function);
    if (code)
        return code;
    code = destroy(function, comm);
    hccl_strict_destroy_leave();
    return code;
}

/* The reference that the handle stood for goes with it. */
static void drop_handle(hccl_comm *comm)
{
    hccl_comm_forget(comm);
    if (soft_handle_remove(SOFT_COMM, comm->handle))
        hccl_comm_put(comm);
}

HcclResult HcclCommDestroy(HcclComm handle)
{
    hccl_comm *comm;
    HCCL_ENTER();
    if (!handle)
        return HCCL_SUCCESS;
    HcclResult code = hccl_comm_find(__func__, handle, &comm);
    if (code)
        return code;
    code = comm->one_sided ? destroy_one_sided(__func__, comm) : destroy(__func__, comm);
    if (!code)
        drop_handle(comm);
    hccl_comm_put(comm);
    return code;
}

static bool is_refused(hccl_comm *comm)
{
    pthread_mutex_lock(&comm->lock);
    bool refused = comm->closed && !comm->destroyed && comm->watch >= 0;
    pthread_mutex_unlock(&comm->lock);
    return refused;
}

int softnpu_comm_awaited(void *handle)
{
    hccl_comm *comm = handle ? soft_handle_get(SOFT_COMM, handle) : NULL;
    if (!comm)
        return -1;
    int watch = is_refused(comm) ? comm->watch : -1;
    hccl_comm_put(comm);
    return watch;
}

int softnpu_comm_abandon(void *handle)
{
    hccl_comm *comm = handle ? soft_handle_get(SOFT_COMM, handle) : NULL;
    if (!comm)
        return -1;
    bool ended = is_refused(comm) && !end_comm(__func__, comm);
    if (ended)
        drop_handle(comm);
    hccl_comm_put(comm);
    return ended ? 0 : -1;
}
