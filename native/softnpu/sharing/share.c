/* share.c: offering file descriptors to other processes of this user, and fetching theirs.
 *
 * A key is a number that says who offers and what:   63..42 process id | 41..38 number | 37..0 token
 * The offering process answers on the abstract socket "softnpu-<pid>-<number>" while it has offers, on a thread of its
 * own. It asks the kernel who is calling: the user must be the same, and unless the offer is open to all, the process id
 * must have been allowed. The fetching side in turn checks that the answer comes from the process that the key names.
 * Processes of one user can read each other's memory anyway; the token is for mistakes, not against them. Both must see
 * the same process ids and abstract sockets: containers that share memory by key share these namespaces, too.           */
#include "share.h"
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <unistd.h>

enum { CALLER_MS = 1000, RETRY_MS = 10 };

typedef struct offer {
    struct offer *next;
    uint64_t key;
    soft_offer what;
    int fd;
    bool any_pid;
    size_t npids;
    int32_t *pids;
} offer;

typedef struct server {
    int listener, stop;
    unsigned number;
    pthread_t thread;
} server;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static offer *offers;
static server *current;                                     /* while there are offers */

static offer **find(uint64_t key)                           /* locked */
{
    offer **at = &offers;
    while (*at && (*at)->key != key)
        at = &(*at)->next;
    return at;
}

static bool may_fetch(const offer *one, int32_t pid)
{
    bool allowed = one->any_pid;
    for (size_t i = 0; i < one->npids && !allowed; i++)
        allowed = one->pids[i] == pid;
    return allowed;
}

/* ---- the answering thread ---- */

static void answer(int socket)
{
    soft_share_request request;
    soft_share_reply reply = { .code = ACL_ERROR_RT_PARAM_INVALID };
    int fd = -1;
    int32_t pid = soft_share_peer(socket);
    if (pid < 0 || recv(socket, &request, sizeof request, 0) != sizeof request)
        return;                                             /* another user, or not one of us */
    pthread_mutex_lock(&lock);
    const offer *one = *find(request.key);
    if (one && one->what.kind == request.kind) {
        reply.code = may_fetch(one, pid) ? ACL_SUCCESS : ACL_ERROR_RT_NO_PERMISSION;
        reply.what = one->what;
        fd = reply.code ? -1 : fcntl(one->fd, F_DUPFD_CLOEXEC, 0);
    }
    pthread_mutex_unlock(&lock);
    if (!reply.code && fd < 0)
        reply.code = ACL_ERROR_RT_IPC_ERROR;
    soft_share_send(socket, &reply, fd);
    if (fd >= 0)
        close(fd);
}

static void *serve(void *argument)
{
    const server *self = argument;
    struct pollfd wait[2] = { { .fd = self->listener, .events = POLLIN }, { .fd = self->stop, .events = POLLIN } };
    for (;;) {
        if (poll(wait, 2, -1) < 0)
            continue;
        if (wait[1].revents)
            return NULL;
        int socket = accept4(self->listener, NULL, NULL, SOCK_CLOEXEC);
        if (socket < 0) {
            poll(&wait[1], 1, RETRY_MS);                    /* no descriptor left: do not spin until there is one */
            continue;
        }
        soft_share_limit(socket, CALLER_MS);                   /* a caller that says nothing keeps others waiting no longer */
        answer(socket);
        close(socket);
    }
}

static void free_server(server *old)
{
    close(old->listener);
    close(old->stop);
    free(old);
}

static aclError start(void)                                 /* locked */
{
    server *made = malloc(sizeof *made);
    if (!made)
        return soft_error(ACL_ERROR_BAD_ALLOC, "no host memory for sharing");
    made->stop = eventfd(0, EFD_CLOEXEC);
    made->listener = soft_share_listen(&made->number);
    if (made->stop < 0 || made->listener < 0 || soft_thread_start(&made->thread, "softnpu-share", serve, made)) {
        aclError code = soft_error(ACL_ERROR_RT_IPC_ERROR, "cannot offer anything to other processes: %s", strerror(errno));
        free_server(made);
        return code;
    }
    current = made;
    return ACL_SUCCESS;
}

static server *take_idle_server(void)                       /* locked; NULL while there are offers */
{
    server *idle = offers ? NULL : current;
    if (idle)
        current = NULL;
    return idle;
}

static void stop(server *old)                               /* not locked: the thread may be about to take the lock */
{
    if (!old)
        return;
    eventfd_write(old->stop, 1);
    pthread_join(old->thread, NULL);
    free_server(old);
}

/* ---- offers ---- */

static uint64_t new_key(void)                               /* locked */
{
    uint64_t token, key;
    do {
        token = 0;
        if (getrandom(&token, sizeof token, 0) < 0)
            token = (uint64_t)soft_now_ns();
        key = soft_key_of(getpid(), current->number, token);
    } while (*find(key));
    return key;
}

static void free_offer(offer *one)
{
    close(one->fd);
    free(one->pids);
    free(one);
}

aclError soft_share_offer(const soft_offer *what, int fd, bool any_pid, uint64_t *key)
{
    offer *one = calloc(1, sizeof *one);
    if (!one)
        return soft_error(ACL_ERROR_BAD_ALLOC, "no host memory for sharing");
    *one = (offer){ .what = *what, .fd = fcntl(fd, F_DUPFD_CLOEXEC, 0), .any_pid = any_pid };
    if (one->fd < 0) {
        free(one);
        return soft_error(ACL_ERROR_RT_IPC_ERROR, "cannot offer this to other processes: %s", strerror(errno));
    }
    pthread_mutex_lock(&lock);
    aclError code = current ? ACL_SUCCESS : start();
    if (code == ACL_SUCCESS) {
        *key = one->key = new_key();
        one->next = offers;
        offers = one;
    }
    pthread_mutex_unlock(&lock);
    if (code)
        free_offer(one);
    return code;
}

static aclError add_pids(offer *one, const int32_t *pids, size_t count)   /* locked */
{
    if (!one)
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "this process exported nothing under that key");
    int32_t *more = realloc(one->pids, (one->npids + count) * sizeof *more);
    if (!more)
        return soft_error(ACL_ERROR_BAD_ALLOC, "no host memory for sharing");
    memcpy(more + one->npids, pids, count * sizeof *pids);
    one->pids = more;
    one->npids += count;
    return ACL_SUCCESS;
}

aclError soft_share_allow(uint64_t key, const int32_t *pids, size_t count)
{
    if (!pids)
        return soft_null("pid");
    if (!count || count > SOFT_MOST_PIDS)
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "%zu process ids: want 1 to %d", count, SOFT_MOST_PIDS);
    pthread_mutex_lock(&lock);
    aclError code = add_pids(*find(key), pids, count);
    pthread_mutex_unlock(&lock);
    return code;
}

bool soft_share_withdraw(uint64_t key)
{
    pthread_mutex_lock(&lock);
    offer **at = find(key), *one = *at;
    if (one)
        *at = one->next;
    server *idle = take_idle_server();
    pthread_mutex_unlock(&lock);
    if (one)
        free_offer(one);
    stop(idle);
    return one;
}

void soft_share_shutdown(void)
{
    pthread_mutex_lock(&lock);
    offer *list = offers;
    offers = NULL;
    server *idle = take_idle_server();
    pthread_mutex_unlock(&lock);
    while (list) {
        offer *next = list->next;
        free_offer(list);
        list = next;
    }
    stop(idle);
}
