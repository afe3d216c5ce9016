/* fault.c: failures on request, and the gate that every exported function passes first. */
#include "runtime.h"
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

atomic_int soft_gate;

typedef enum { FAIL, EXEC, DELAY, FLIP, HOLD, HALF, HANG, DROP } action;
static const char *const action_names[] = { "fail", "exec", "delay", "flip", "hold", "half", "hang", "drop" };
typedef struct fault {
    struct fault *next;
    char function[64];
    action what;
    int64_t value;                                          /* a code, milliseconds, or the place of a byte */
    char name[SOFT_HOLD_NAME];                              /* of a hold, */
    uint64_t number;                                        /* and its number */
    uint64_t left;                                          /* calls until it strikes; 0 = every call */
} fault;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static fault *faults;

/* A misspelt function would make a test pass for nothing, so the name must be one that this library exports. */
static bool is_exported(const char *function)
{
    Dl_info self;
    if (!dladdr((void *)(uintptr_t)soft_fault, &self))
        return true;
    void *library = dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    bool found = !library || dlsym(library, function);
    if (library)
        dlclose(library);
    return found;
}

/* Other functions do not look for it. */
static bool may_flip(const char *function)
{
    return !strcmp(function, "HcclBatchGet") || !strcmp(function, "HcclBatchPut");
}

static bool parse_number(const char *text, int64_t *value, const char **end)
{
    char *after;
    errno = 0;
    *value = strtoll(text, &after, 10);
    *end = after;
    return after != text && errno == 0;
}

static bool is_possible(action what, int64_t value)
{
    return what == FLIP || (what == DELAY ? value >= 0 : value > 0 && value <= INT32_MAX);
}

static bool is_held(action what)
{
    return what == HOLD || what == HALF;
}

static bool parse_name(const char *text, fault *out, const char **end)
{
    size_t length = strcspn(text, "@");
    *end = text + length;
    if (!soft_hold_is_name(text, length))
        return false;
    memcpy(out->name, text, length);
    return true;
}

static bool parse_value(action what, const char *text, fault *out, const char **end)
{
    if (is_held(what))
        return parse_name(text, out, end);
    return parse_number(text, &out->value, end) && is_possible(what, out->value);
}

static bool parse_action(const char *text, fault *out)
{
    for (action what = FAIL; what <= DROP; what++) {
        size_t length = strlen(action_names[what]);
        bool valued = what <= HALF;
        if (strncmp(text, action_names[what], length) || (valued && text[length] != '='))
            continue;
        const char *rest = text + length;
        if (valued && !parse_value(what, rest + 1, out, &rest))
            return false;
        out->what = what;
        int64_t nth = 1;
        if (!strcmp(rest, "@*"))
            nth = 0;
        else if (*rest && (*rest != '@' || !parse_number(rest + 1, &nth, &rest) || *rest || nth < 1))
            return false;
        out->left = (uint64_t)nth;
        return true;
    }
    return false;
}

static fault *parse_one(char *text)
{
    char *colon = strchr(text, ':');
    fault parsed = { .next = NULL };
    if (!colon || colon == text || (size_t)(colon - text) >= sizeof parsed.function)
        return NULL;
    memcpy(parsed.function, text, (size_t)(colon - text));
    if (!parse_action(colon + 1, &parsed) || !is_exported(parsed.function) || (parsed.what == FLIP && !may_flip(parsed.function)))
        return NULL;
    fault *made = malloc(sizeof *made);
    if (made)
        *made = parsed;
    return made;
}

static void free_list(fault *list)
{
    while (list) {
        fault *next = list->next;
        free(list);
        list = next;
    }
}

static bool find_holds(fault *list)
{
    for (fault *one = list; one; one = one->next)
        if (is_held(one->what) && !(one->number = soft_hold_number(one->name))) {
            soft_error(ACL_ERROR_RT_RESOURCE_ALLOC_FAIL, "no room for the hold '%s', or no file descriptor", one->name);
            return false;
        }
    return true;
}

static void install(fault *list)                            /* behind the faults that are already there */
{
    pthread_mutex_lock(&lock);
    fault **last = &faults;
    while (*last)
        last = &(*last)->next;
    *last = list;
    if (faults)
        atomic_fetch_or(&soft_gate, SOFT_GATE_FAULTS);
    pthread_mutex_unlock(&lock);
}

int softnpu_fault(const char *spec)
{
    if (atomic_load_explicit(&soft_gate, memory_order_relaxed) & SOFT_GATE_FORKED)
        return soft_fault(__func__, NULL) ? -1 : 0;
    char *copy = spec ? strdup(spec) : NULL, *state = NULL;
    fault *list = NULL, **last = &list;
    bool good = copy;
    for (char *one = copy ? strtok_r(copy, ";", &state) : NULL; one && good; one = strtok_r(NULL, ";", &state)) {
        *last = parse_one(one + strspn(one, " "));
        good = *last;
        if (!good)
            soft_error(ACL_ERROR_INVALID_PARAM, "fault '%s': want function:fail=CODE|exec=CODE|delay=MS|flip=BYTE|hold=NAME|half=NAME|hang|drop, "
                       "then nothing, @N or @*; the function must be an exported name, for flip HcclBatchGet or HcclBatchPut", one);
        else
            last = &(*last)->next;
    }
    free(copy);
    if (!good || !find_holds(list)) {
        free_list(list);
        return -1;
    }
    install(list);
    return 0;
}

void softnpu_fault_clear(void)
{
    if (atomic_load_explicit(&soft_gate, memory_order_relaxed) & SOFT_GATE_FORKED)
        return;
    pthread_mutex_lock(&lock);
    fault *old = faults;
    faults = NULL;
    atomic_fetch_and(&soft_gate, ~SOFT_GATE_FAULTS);
    pthread_mutex_unlock(&lock);
    free_list(old);
    soft_hold_open_all();
}

int soft_fault_init(void)
{
    const char *spec = getenv("SOFTNPU_FAULTS");
    if (!spec || softnpu_fault(spec) == 0)
        return ACL_SUCCESS;
    return soft_error(ACL_ERROR_INVALID_PARAM, "SOFTNPU_FAULTS is not a fault specification");
}

static void strike(const fault *one, soft_exec_fault *sum, int *fail)
{
    switch (one->what) {
    case FAIL:  *fail = (int)one->value; break;
    case EXEC:  sum->code = (aclError)one->value; break;
    case DELAY: sum->delay_ms += one->value; break;
    case FLIP:  sum->flip = true; sum->flip_at = one->value; break;
    case HOLD:  sum->hold = one->number; break;
    case HALF:  sum->half = one->number; break;
    case HANG:  sum->hang = true; break;
    case DROP:  sum->drop = true; break;
    }
}

static int collect(const char *function, soft_exec_fault *sum)
{
    int fail = 0;
    pthread_mutex_lock(&lock);
    for (fault **at = &faults; *at; ) {
        fault *one = *at;
        bool matches = !strcmp(one->function, function);
        if (matches && one->left <= 1)
            strike(one, sum, &fail);
        if (matches && one->left == 1) {                    /* spent */
            *at = one->next;
            free(one);
            continue;
        }
        if (matches && one->left)
            one->left--;
        at = &one->next;
    }
    if (!faults)
        atomic_fetch_and(&soft_gate, ~SOFT_GATE_FAULTS);
    pthread_mutex_unlock(&lock);
    return fail;
}

static void sleep_ms(int64_t ms)
{
    struct timespec left = { .tv_sec = (time_t)(ms / 1000), .tv_nsec = (long)(ms % 1000 * 1000000) };
    while (nanosleep(&left, &left) && errno == EINTR) { }
}

static int faulty(const char *function, soft_exec_fault *exec)
{
    soft_exec_fault sum = { .code = 0 };
    int fail = collect(function, &sum);
    if (fail)
        return soft_error(fail, "%s: injected failure", function);
    if (exec) {
        *exec = sum;
        return 0;
    }
    soft_hold_stand(sum.hold);
    if (sum.delay_ms)                                       /* no task: the call is late, or fails as its task would have */
        sleep_ms(sum.delay_ms);
    return sum.code ? soft_error(sum.code, "%s: injected failure", function) : 0;
}

int soft_fault(const char *function, soft_exec_fault *exec)
{
    int gate = atomic_load_explicit(&soft_gate, memory_order_relaxed);
    if (exec)
        *exec = (soft_exec_fault){ .code = 0 };
    if (!gate)
        return 0;
    if (gate & SOFT_GATE_FORKED)
        return soft_error(ACL_ERROR_RT_INTERNAL_ERROR, "%s: this process was forked after aclInit; threads and device memory "
                          "stayed with the parent. Start new processes with spawn, or fork before aclInit", function);
    return faulty(function, exec);
}
