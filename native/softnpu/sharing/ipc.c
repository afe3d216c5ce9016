/* ipc.c: device memory of other processes, by key. The exporter offers a part of an allocation; the importer maps it. */
#include "runtime.h"
#include <stdlib.h>
#include <unistd.h>

typedef struct import {
    struct import *next;
    uint64_t key;
    void *addr;                                             /* NULL while being mapped */
} import;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static import *imports;

aclError soft_key_check(const char *key, size_t len, uint64_t flags, uint64_t known)
{
    if (!key)
        return soft_null("key");
    if (len < SOFT_KEY_TEXT)
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "len %zu: a key takes %d bytes", len, SOFT_KEY_TEXT);
    return soft_flags_check(flags, known);
}

aclError soft_flags_check(uint64_t flags, uint64_t known)
{
    if (flags & ~known)
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "flags %#llx: known are %#llx", (unsigned long long)flags, (unsigned long long)known);
    return ACL_SUCCESS;
}

static aclError offer_memory(const void *devPtr, size_t size, bool any_pid, uint64_t *key)
{
    soft_span span;
    if (!size || !soft_span_of(devPtr, size, &span) || span.placement != 1)
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "[%p, +%zu) is not part of one device allocation", devPtr, size);
    if (span.fd < 0)
        return soft_error(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "%p is adopted or imported memory: only what aclrtMalloc returned can be "
                          "exported", devPtr);
    soft_offer what = { SOFT_OFFER_MEMORY, 1, span.fd_offset + ((uintptr_t)devPtr - span.base), size };
    return soft_share_offer(&what, span.fd, any_pid, key);
}

aclError aclrtIpcMemGetExportKey(void *devPtr, size_t size, char *key, size_t len, uint64_t flags)
{
    uint64_t made;
    SOFT_TRY(soft_fault(__func__, NULL));
    if (!devPtr)
        return soft_null("devPtr");
    SOFT_TRY(soft_key_check(key, len, flags, ACL_RT_IPC_MEM_EXPORT_FLAG_DISABLE_PID_VALIDATION));
    SOFT_TRY(soft_context_need());
    SOFT_TRY(offer_memory(devPtr, size, flags & ACL_RT_IPC_MEM_EXPORT_FLAG_DISABLE_PID_VALIDATION, &made));
    soft_key_print(made, key);
    return ACL_SUCCESS;
}

aclError aclrtIpcMemSetImportPid(const char *key, int32_t *pid, size_t num)
{
    uint64_t parsed;
    SOFT_TRY(soft_fault(__func__, NULL));
    SOFT_TRY(soft_key_parse(key, &parsed));
    return soft_share_allow(parsed, pid, num);
}

/* ---- imports ---- */

static import **find(uint64_t key)                          /* locked */
{
    import **at = &imports;
    while (*at && (*at)->key != key)
        at = &(*at)->next;
    return at;
}

static aclError claim(import *made)                         /* so that two threads do not import one key at a time */
{
    pthread_mutex_lock(&lock);
    bool first = !*find(made->key);
    if (first) {
        made->next = imports;
        imports = made;
    }
    pthread_mutex_unlock(&lock);
    if (!first)
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "this key was imported already: close it first");
    return ACL_SUCCESS;
}

static import *take(uint64_t key, bool mapped)
{
    pthread_mutex_lock(&lock);
    import **at = find(key), *one = *at;
    if (one && (one->addr != NULL) == mapped)
        *at = one->next;
    else
        one = NULL;
    pthread_mutex_unlock(&lock);
    return one;
}

static aclError fetch_and_map(uint64_t key, void **addr)
{
    soft_offer what;
    int fd;
    SOFT_TRY(soft_share_fetch(key, SOFT_OFFER_MEMORY, &what, &fd));
    aclError code = soft_mem_import(fd, what.offset, what.size, 1, true, addr);
    close(fd);                                              /* the mapping keeps the memory */
    return code;
}

static aclError import_memory(uint64_t key, void **addr)
{
    import *made = calloc(1, sizeof *made);
    if (!made)
        return soft_error(ACL_ERROR_BAD_ALLOC, "no host memory for an import");
    made->key = key;
    aclError code = claim(made);
    if (code) {
        free(made);
        return code;
    }
    code = fetch_and_map(key, addr);
    if (code) {
        free(take(key, false));
        return code;
    }
    pthread_mutex_lock(&lock);
    made->addr = *addr;
    pthread_mutex_unlock(&lock);
    return ACL_SUCCESS;
}

aclError aclrtIpcMemImportByKey(void **devPtr, const char *key, uint64_t flags)
{
    uint64_t parsed;
    SOFT_TRY(soft_fault(__func__, NULL));
    if (!devPtr)
        return soft_null("devPtr");
    SOFT_TRY(soft_flags_check(flags, ACL_RT_IPC_MEM_IMPORT_FLAG_ENABLE_PEER_ACCESS));
    SOFT_TRY(soft_key_parse(key, &parsed));
    SOFT_TRY(soft_context_need());
    return import_memory(parsed, devPtr);
}

/* For both sides: the importer unmaps, the exporter takes the offer back. */
aclError aclrtIpcMemClose(const char *key)
{
    uint64_t parsed;
    SOFT_TRY(soft_fault(__func__, NULL));
    SOFT_TRY(soft_key_parse(key, &parsed));
    import *one = take(parsed, true);
    if (one) {
        soft_mem_unimport(one->addr);
        free(one);
        return ACL_SUCCESS;
    }
    if (!soft_share_withdraw(parsed))
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "this process has neither imported nor exported that key");
    return ACL_SUCCESS;
}
