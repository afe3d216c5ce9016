/* The queue of a connection: a ring of requests, room for 510 of them, and the thread that stands for the NIC. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>
#include "hccl_queue_pair.h"

static void destroy(soft_object *object)
{
    hccl_queue_pair *pair = (hccl_queue_pair *)object;      /* its first member */
    close(pair->flag);
    pthread_cond_destroy(&pair->work);
    pthread_cond_destroy(&pair->room);
    pthread_mutex_destroy(&pair->lock);
    free(pair);
}

/* ---- the executor ---- */

static hccl_request *request_at(hccl_queue_pair *pair, uint64_t number)
{
    return &pair->ring[number % HCCL_QUEUE_DEPTH];
}

/* Locked. The first failure is the connection's: what is in the queue, and what comes, is answered without being done. No fence
 * sets the flag any longer, and nothing else wakes a stream that waits for it: a request's error is seen by HCCL's heartbeat thread
 * alone. [src transport_roce_mem.cc:606-620, heartbeat.cc:1636] */
static void fail(hccl_queue_pair *pair, aclError code, const char *text)
{
    if (!pair->failure) {
        pair->failure = code;
        snprintf(pair->failure_text, sizeof pair->failure_text, "%s", text);
    }
    pair->done = pair->started = pair->posted;
    pthread_cond_broadcast(&pair->room);
}

static bool await_work(hccl_queue_pair *pair)               /* locked */
{
    while (!pair->ended && pair->done == pair->started)
        pthread_cond_wait(&pair->work, &pair->lock);
    return !pair->ended;
}

static void answer(hccl_queue_pair *pair, bool fence)       /* locked */
{
    pair->done++;
    pthread_cond_broadcast(&pair->room);
    if (fence)
        hccl_flag_set(pair->flag);
}

static void *execute(void *argument)
{
    hccl_queue_pair *pair = argument;
    char text[SOFT_TEXT] = "";
    soft_error_divert(text);
    pthread_mutex_lock(&pair->lock);
    while (await_work(pair)) {
        hccl_request request = *request_at(pair, pair->done);
        pthread_mutex_unlock(&pair->lock);
        aclError code = hccl_request_run(pair, &request);
        pthread_mutex_lock(&pair->lock);
        if (code || pair->failure)
            fail(pair, code, text);
        else
            answer(pair, request.fence);
    }
    pthread_mutex_unlock(&pair->lock);
    return NULL;
}

void hccl_queue_pair_pause(hccl_queue_pair *pair, int64_t ms)
{
    struct timespec until;
    soft_deadline(&until, ms);
    pthread_mutex_lock(&pair->lock);
    while (!pair->ended && !pthread_cond_timedwait(&pair->work, &pair->lock, &until)) { }
    pthread_mutex_unlock(&pair->lock);
}

/* ---- its life ---- */

static hccl_queue_pair *create(const hccl_comm *comm, uint32_t rank)
{
    const hccl_peer *peer = &comm->peers[rank];
    char name[16];
    hccl_queue_pair *pair = calloc(1, sizeof *pair);
    if (!pair)
        return NULL;
    pair->object = (soft_object){ .refs = 1, .destroy = destroy };
    pair->rank = rank;
    pair->side = hccl_side(comm, rank);
    pair->link = peer->link;
    pair->pid = peer->pid;
    pair->gate = peer->gate;
    pair->flag = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    pthread_mutex_init(&pair->lock, NULL);
    soft_cond_init(&pair->work);
    soft_cond_init(&pair->room);
    snprintf(name, sizeof name, "softnpu-nic%u", rank);
    if (pair->flag >= 0 && !soft_thread_start(&pair->executor, name, execute, pair))
        return pair;
    soft_unref(&pair->object);
    return NULL;
}

HcclResult hccl_queue_pair_of(const char *function, hccl_comm *comm, uint32_t rank, hccl_queue_pair **out)
{
    hccl_peer *peer = &comm->peers[rank];
    pthread_mutex_lock(&comm->lock);
    if (!peer->queue_pair)
        peer->queue_pair = create(comm, rank);
    *out = peer->queue_pair;
    if (*out)
        soft_ref(&(*out)->object);
    pthread_mutex_unlock(&comm->lock);
    return *out ? HCCL_SUCCESS : soft_hccl_error(HCCL_E_MEMORY, "%s: no room for the connection to rank %u", function, rank);
}

void hccl_queue_pair_put(hccl_queue_pair *pair)
{
    if (pair)
        soft_unref(&pair->object);
}

void hccl_queue_pair_end(hccl_queue_pair *pair)
{
    if (!pair)
        return;
    pthread_mutex_lock(&pair->lock);
    bool first = !pair->ended;
    pair->ended = true;
    fail(pair, ACL_ERROR_RT_SUSPECT_REMOTE_ERROR, "the communicator was destroyed, or its link replaced");
    hccl_flag_break(pair->flag);
    pthread_cond_broadcast(&pair->work);
    pthread_mutex_unlock(&pair->lock);
    if (first)
        pthread_join(pair->executor, NULL);
}

/* ---- posting and starting ---- */

bool hccl_queue_pair_post(hccl_queue_pair *pair, const hccl_request *request, int64_t deadline)
{
    struct timespec until = { (time_t)(deadline / 1000000000), (long)(deadline % 1000000000) };
    bool late = false;
    pthread_mutex_lock(&pair->lock);
    while (!late && !pair->failure && pair->posted - pair->done >= HCCL_QUEUE_ROOM)
        late = pthread_cond_timedwait(&pair->room, &pair->lock, &until) != 0;
    bool room = pair->posted - pair->done < HCCL_QUEUE_ROOM;
    if (room && !pair->failure)
        *request_at(pair, pair->posted++) = *request;
    pthread_mutex_unlock(&pair->lock);
    return room;
}

uint64_t hccl_queue_pair_posted(hccl_queue_pair *pair)
{
    pthread_mutex_lock(&pair->lock);
    uint64_t posted = pair->posted;
    pthread_mutex_unlock(&pair->lock);
    return posted;
}

bool hccl_queue_pair_idle(hccl_queue_pair *pair)
{
    if (!pair)
        return true;
    pthread_mutex_lock(&pair->lock);
    bool idle = pair->posted == pair->done;
    pthread_mutex_unlock(&pair->lock);
    return idle;
}

void hccl_queue_pair_start(hccl_queue_pair *pair, uint64_t number)
{
    pthread_mutex_lock(&pair->lock);
    if (number > pair->started) {
        pair->started = number;
        pthread_cond_signal(&pair->work);
    }
    pthread_mutex_unlock(&pair->lock);
}

aclError hccl_queue_pair_failed(hccl_queue_pair *pair)
{
    pthread_mutex_lock(&pair->lock);
    aclError code = pair->failure;
    if (code)
        soft_error(code, "%s", pair->failure_text);
    pthread_mutex_unlock(&pair->lock);
    return code;
}
