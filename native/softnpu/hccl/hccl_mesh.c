/* Every rank finds every other. Of each pair the lower rank listens under a name made of key and rank, the higher connects
 * and says hello; the lower answers, and adds the ends of two channels if the communicator has them.
 * No rank waits for a higher one before all lower ones have answered it, so there is no circle to deadlock in.
 * A connection that ends before its hello was answered is no error (the other side may have given up a moment ago
 * and be about to try again): the higher rank keeps trying until its deadline.                                         */
#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#include "hccl_queue_pair.h"

#define HELLO_NS    ((int64_t)1000000000)               /* a stranger may keep the door this long */
#define PAUSE_MAX_MS 16

static uint64_t bit(uint32_t rank)
{
    return (uint64_t)1 << rank;
}

static bool is_linked(hccl_comm *comm, uint32_t rank)
{
    return hccl_socket_alive(comm->peers[rank].link);   /* only set-up changes links, and we are it */
}

/* The ranks that this call must find, one bit each. A rank that was found is not looked for again, even if it is lost at
 * once: then the next message to it fails, which is sooner than waiting for it to come back.                               */
static uint64_t find_missing(hccl_comm *comm, int64_t only)
{
    uint64_t missing = 0;
    for (uint32_t rank = 0; rank < comm->size; rank++)
        if (rank != comm->rank && (only < 0 || only == rank) && !is_linked(comm, rank))
            missing |= bit(rank);
    return missing;
}

static uint64_t above(const hccl_comm *comm, uint64_t ranks)
{
    return ranks & ~(bit(comm->rank) | (bit(comm->rank) - 1));
}

static void close_channels(const int channels[2])
{
    for (int i = 0; i < 2; i++)
        if (channels[i] >= 0)
            close(channels[i]);
}

/* Under the lock. A link that hung up may be replaced once no task looks at it any longer. */
static bool replaceable(const hccl_comm *comm, uint32_t rank)
{
    return comm->peers[rank].link < 0 || comm->tasks == 0;
}

static void set_channel(hccl_channel *channel, int fd)
{
    if (channel->fd >= 0)
        close(channel->fd);
    channel->fd = fd;
}

HcclResult hccl_mesh_install(hccl_comm *comm, uint32_t rank, int link, pid_t pid, hccl_gate *gate, const int channels[2])
{
    hccl_peer *peer = &comm->peers[rank];
    pthread_mutex_lock(&comm->lock);
    bool taken = replaceable(comm, rank) && !comm->closed;
    if (taken) {
        hccl_queue_pair_end(peer->queue_pair);
        hccl_queue_pair_put(peer->queue_pair);
        peer->queue_pair = NULL;
        if (peer->link >= 0)
            close(peer->link);
        hccl_remotes_clear(&peer->remotes);             /* what the old link told about is not true for the new one */
        hccl_gate_unmap(peer->gate);
        peer->link = link;
        peer->gate = gate;
        peer->pid = pid;
        if (channels[0] >= 0) {                         /* made once; later links of a two-sided communicator bring none */
            set_channel(&peer->send, channels[0]);
            set_channel(&peer->recv, channels[1]);
        }
    }
    bool closed = comm->closed;
    pthread_mutex_unlock(&comm->lock);
    if (taken)
        return HCCL_SUCCESS;
    close(link);
    hccl_gate_unmap(gate);
    close_channels(channels);
    return closed ? HCCL_E_NOT_FOUND : HCCL_E_AGAIN;
}

static bool needs_channels(const hccl_comm *comm, uint32_t rank)
{
    return !comm->one_sided && comm->peers[rank].send.fd < 0;
}

static void hello_to(const hccl_comm *comm, uint32_t rank, hccl_message *hello)
{
    hccl_message_init(hello, HCCL_HELLO, 0, 1);
    hello->body.hello = (hccl_hello){comm->key, comm->rank, rank, comm->size, needs_channels(comm, rank) ? 0 : 1};
}

/* ---- the higher rank ---- */

/* With the answer to our hello come the gate, and our ends of the channels where there are any. */
static HcclResult unpack(const hccl_comm *comm, uint32_t rank, hccl_message *answer, hccl_gate **gate, int channels[2])
{
    bool complete = answer->nfds == (needs_channels(comm, rank) ? 3 : 1);
    *gate = complete ? hccl_gate_map(answer->fds[0]) : NULL;
    if (!*gate) {
        hccl_message_close(answer);
        return HCCL_E_INTERNAL;
    }
    close(answer->fds[0]);
    for (int i = 1; i < answer->nfds; i++)
        channels[i - 1] = answer->fds[i];
    return HCCL_SUCCESS;
}

static HcclResult greet(hccl_comm *comm, const hccl_wait *wait, uint32_t rank, int fd)
{
    hccl_message hello;
    hccl_gate *gate;
    int channels[2] = {-1, -1};
    pid_t pid;
    HcclResult code = hccl_socket_ours(fd, &pid) ? HCCL_SUCCESS : HCCL_E_UNAVAIL;
    if (!code) {
        hello_to(comm, rank, &hello);
        code = hccl_message_send(wait, fd, &hello);
    }
    if (!code)
        code = hccl_message_receive(wait, fd, HCCL_HELLO, 0, &hello);
    if (!code)
        code = unpack(comm, rank, &hello, &gate, channels);
    if (!code)
        return hccl_mesh_install(comm, rank, fd, pid, gate, channels);
    close(fd);
    return code == HCCL_E_UNAVAIL ? HCCL_E_AGAIN : code;
}

static HcclResult try_to_join(hccl_comm *comm, const hccl_wait *wait, uint32_t rank)
{
    int fd = hccl_socket_connect(&comm->key, rank);
    if (fd >= 0)
        return greet(comm, wait, rank, fd);
    bool not_yet = errno == ECONNREFUSED || errno == ENOENT || errno == EAGAIN || errno == EINTR || errno == ECONNRESET;
    return not_yet ? HCCL_E_AGAIN : HCCL_E_SYSCALL;
}

static HcclResult join(hccl_comm *comm, const hccl_wait *wait, uint32_t rank)
{
    for (int pause = 1;; pause = pause < PAUSE_MAX_MS ? pause * 2 : PAUSE_MAX_MS) {
        HcclResult code = try_to_join(comm, wait, rank);
        if (code != HCCL_E_AGAIN)
            return hccl_wait_failed(wait, rank, code);
        code = hccl_wait_pause(wait, pause);
        if (code)
            return hccl_wait_failed(wait, rank, code);
    }
}

/* ---- the lower rank ---- */

/* ends[0..1] become ours (send, receive), ends[2..3] the peer's */
static bool make_channels(int ends[4])
{
    int there[2], back[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, there))
        return false;
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, back)) {
        close_channels(there);
        return false;
    }
    const int sorted[4] = {there[0], back[0], back[1], there[1]};
    memcpy(ends, sorted, sizeof sorted);
    return true;
}

/* What goes with our answer: a gate, and the peer's ends of two channels where they are needed. */
static bool pack(const hccl_comm *comm, uint32_t rank, hccl_message *answer, hccl_gate **gate, int channels[2])
{
    int fd = hccl_gate_new(), ends[4];
    *gate = fd < 0 ? NULL : hccl_gate_map(fd);
    bool made = *gate && (!needs_channels(comm, rank) || make_channels(ends));
    if (made) {
        answer->fds[answer->nfds++] = fd;
        for (int i = 0; i < 2 && needs_channels(comm, rank); i++) {
            channels[i] = ends[i];
            answer->fds[answer->nfds++] = ends[2 + i];
        }
        return true;
    }
    if (fd >= 0)
        close(fd);
    hccl_gate_unmap(*gate);
    return false;
}

static HcclResult welcome(hccl_comm *comm, const hccl_wait *wait, uint32_t rank, int fd, pid_t pid)
{
    hccl_message hello;
    hccl_gate *gate;
    int channels[2] = {-1, -1};
    hello_to(comm, rank, &hello);
    if (!pack(comm, rank, &hello, &gate, channels))
        return close(fd), HCCL_E_SYSCALL;
    HcclResult code = hccl_message_send(wait, fd, &hello);
    hccl_message_close(&hello);                         /* they are the peer's now */
    if (!code)
        return hccl_mesh_install(comm, rank, fd, pid, gate, channels);
    hccl_gate_unmap(gate);
    close_channels(channels);
    close(fd);
    return HCCL_E_AGAIN;                                /* it left, or does not listen; a rank that waits for this one will come again */
}

static HcclResult turn_away(const hccl_wait *wait, int fd, HcclResult code)
{
    hccl_message_confirm(wait, fd, code);
    close(fd);
    return HCCL_E_AGAIN;
}

static bool same_key(const hccl_key *one, const hccl_key *other)
{
    return one->word[0] == other->word[0] && one->word[1] == other->word[1];
}

/* E_AGAIN: it was not one of the ranks that we wait for */
static HcclResult admit(hccl_comm *comm, const hccl_wait *wait, uint64_t *missing, int fd)
{
    hccl_message message;
    pid_t pid;
    int64_t patience = soft_now_ns() + HELLO_NS;
    hccl_wait brief = {wait->function, patience < wait->deadline ? patience : wait->deadline, wait->cancel};
    if (!hccl_socket_ours(fd, &pid) || hccl_message_receive(&brief, fd, HCCL_HELLO, 0, &message))
        return close(fd), HCCL_E_AGAIN;
    const hccl_hello *hello = &message.body.hello;
    hccl_message_close(&message);                       /* and the descriptors that no call asked for */
    if (!same_key(&hello->key, &comm->key) || hello->to != comm->rank)
        return close(fd), HCCL_E_AGAIN;
    if (hello->ranks != comm->size || hello->from <= comm->rank || hello->from >= comm->size) {
        soft_hccl_error(HCCL_E_PARA, "%s: a rank %u of %u came, here are %u ranks", wait->function, hello->from,
                        hello->ranks, comm->size);
        turn_away(&brief, fd, HCCL_E_PARA);
        return HCCL_E_PARA;
    }
    if (is_linked(comm, hello->from))
        return turn_away(&brief, fd, HCCL_E_PARA);      /* another process has that rank already */
    if (!(*missing & bit(hello->from)))
        return close(fd), HCCL_E_AGAIN;                 /* not now: it will try again */
    if (hello->one_sided != (needs_channels(comm, hello->from) ? 0u : 1u))
        return turn_away(&brief, fd, HCCL_E_PARA);
    HcclResult code = welcome(comm, &brief, hello->from, fd, pid);
    if (!code)
        *missing &= ~bit(hello->from);
    return code;
}

static HcclResult gather(hccl_comm *comm, const hccl_wait *wait, uint64_t *missing, int door)
{
    while (above(comm, *missing)) {
        HcclResult code = hccl_wait_fd(wait, door, POLLIN);
        if (code)
            return code;
        int fd = accept4(door, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0 && (errno == EAGAIN || errno == EINTR || errno == ECONNABORTED))
            continue;                                   /* it left before we opened */
        if (fd < 0)
            return HCCL_E_SYSCALL;
        code = admit(comm, wait, missing, fd);
        if (code && code != HCCL_E_AGAIN)
            return code;
    }
    return HCCL_SUCCESS;
}

/* The name may still belong to an attempt that is just ending. */
static HcclResult open_door(hccl_comm *comm, const hccl_wait *wait, int *door)
{
    while ((*door = hccl_socket_listen(&comm->key, comm->rank)) < 0) {
        if (errno != EADDRINUSE)
            return HCCL_E_SYSCALL;
        HcclResult code = hccl_wait_pause(wait, PAUSE_MAX_MS);
        if (code)
            return code;
    }
    return HCCL_SUCCESS;
}

static void break_link(const hccl_comm *comm, uint32_t rank)
{
    const hccl_peer *peer = &comm->peers[rank];
    if (peer->link < 0)
        return;
    hccl_gate_shut(peer->gate);
    hccl_gate_clear(peer->gate, hccl_side(comm, rank)); /* the peer takes the end of the link for the end of our writing */
    shutdown(peer->link, SHUT_RDWR);
}

void hccl_mesh_break(hccl_comm *comm, int64_t only)
{
    for (uint32_t rank = 0; rank < comm->size; rank++)
        if (only < 0 || only == rank)
            break_link(comm, rank);
}

/* A transfer that still runs over a link that has hung up ends by itself, soon. */
static HcclResult check_idle(hccl_comm *comm, const hccl_wait *wait, uint64_t missing)
{
    bool idle = true;
    pthread_mutex_lock(&comm->lock);
    for (uint32_t rank = 0; rank < comm->size; rank++)
        idle = idle && (!(missing & bit(rank)) || replaceable(comm, rank));
    pthread_mutex_unlock(&comm->lock);
    if (idle)
        return HCCL_SUCCESS;
    return soft_hccl_error(HCCL_E_AGAIN, "%s: transfers of this communicator are queued or running", wait->function);
}

HcclResult hccl_mesh_connect(hccl_comm *comm, const hccl_wait *wait, int64_t only)
{
    int door = -1;
    uint64_t missing = find_missing(comm, only);
    HcclResult code = check_idle(comm, wait, missing);
    if (code)
        return code;
    if (above(comm, missing) && (code = open_door(comm, wait, &door)))
        return hccl_wait_failed(wait, comm->rank, code);
    for (uint32_t rank = 0; !code && rank < comm->rank; rank++)
        if (missing & bit(rank))
            code = join(comm, wait, rank);
    if (!code && door >= 0) {
        code = gather(comm, wait, &missing, door);
        if (code && code != HCCL_E_PARA)                /* whose reason has been told */
            hccl_wait_failed(wait, (uint32_t)__builtin_ctzll(above(comm, missing)), code);
    }
    if (door >= 0)
        close(door);
    return code;
}
