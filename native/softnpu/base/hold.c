/* hold.c: places where a task or a call stands still until a test lets it pass. A test finds a hold by its name, a task by its
 * number: so a task that comes late to a hold that was released passes, even if another hold has the name by then.          */
#include "runtime.h"
#include <ctype.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { HOLDS = 64 };

typedef struct hold {
    uint64_t number;                                        /* 0: free */
    char name[SOFT_HOLD_NAME];
    int arrivals;                                           /* an eventfd that counts them */
    uint32_t standing;
    bool is_open;
} hold;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t opened = PTHREAD_COND_INITIALIZER;
static hold holds[HOLDS];
static uint64_t numbers;

bool soft_hold_is_name(const char *text, size_t length)
{
    if (!length || length >= SOFT_HOLD_NAME)
        return false;
    for (size_t i = 0; i < length; i++)
        if (!isalnum((unsigned char)text[i]) && text[i] != '-' && text[i] != '_')
            return false;
    return true;
}

static hold *find(const char *name)                         /* locked */
{
    for (hold *one = holds; name && one < holds + HOLDS; one++)
        if (one->number && !one->is_open && !strcmp(one->name, name))
            return one;
    return NULL;
}

static hold *find_number(uint64_t number)                   /* locked */
{
    for (hold *one = holds; number && one < holds + HOLDS; one++)
        if (one->number == number)
            return one;
    return NULL;
}

static hold *make(const char *name)                         /* locked */
{
    hold *made = holds;
    while (made < holds + HOLDS && made->number)
        made++;
    int arrivals = made < holds + HOLDS ? eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK) : -1;
    if (arrivals < 0)
        return NULL;
    *made = (hold){ .number = ++numbers, .arrivals = arrivals };
    strcpy(made->name, name);                               /* soft_hold_is_name has looked at its length */
    return made;
}

static void vacate(hold *one)                               /* locked */
{
    close(one->arrivals);
    *one = (hold){ .number = 0 };
}

static void open_up(hold *one)                              /* locked */
{
    one->is_open = true;
    if (!one->standing)
        vacate(one);
    pthread_cond_broadcast(&opened);
}

uint64_t soft_hold_number(const char *name)
{
    pthread_mutex_lock(&lock);
    hold *one = find(name);
    one = one ? one : make(name);
    uint64_t number = one ? one->number : 0;
    pthread_mutex_unlock(&lock);
    return number;
}

void soft_hold_stand(uint64_t number)
{
    pthread_mutex_lock(&lock);
    hold *one = find_number(number);
    if (one && !one->is_open) {
        one->standing++;
        eventfd_write(one->arrivals, 1);
        while (!one->is_open)
            pthread_cond_wait(&opened, &lock);
        if (!--one->standing)
            vacate(one);
    }
    pthread_mutex_unlock(&lock);
}

void soft_hold_open_all(void)
{
    pthread_mutex_lock(&lock);
    for (hold *one = holds; one < holds + HOLDS; one++)
        if (one->number && !one->is_open)
            open_up(one);
    pthread_mutex_unlock(&lock);
}

/* Of those that stand at a hold when a process forks, the child has none: waking them would wait for them. */
static bool is_forked(void)
{
    return atomic_load_explicit(&soft_gate, memory_order_relaxed) & SOFT_GATE_FORKED;
}

int softnpu_hold_arrivals(const char *name)
{
    if (is_forked())
        return -1;
    pthread_mutex_lock(&lock);
    hold *one = find(name);
    int arrivals = one ? one->arrivals : -1;
    pthread_mutex_unlock(&lock);
    return arrivals;
}

int softnpu_hold_release(const char *name)
{
    if (is_forked())
        return -1;
    pthread_mutex_lock(&lock);
    hold *one = find(name);
    if (one)
        open_up(one);
    pthread_mutex_unlock(&lock);
    return one ? 0 : -1;
}
