/* init.c: aclInit to aclFinalize, and queries about the runtime itself. */
#include "runtime.h"
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t references;
static bool was_initialized;

/* The child has our memory but none of our threads: a lock may be held for ever, a queue has no worker. Say so instead
 * of hanging. A child of a process that had not called aclInit (or has called aclFinalize) may start afresh. */
static void in_child(void)
{
    if (soft_initialized())
        atomic_fetch_or(&soft_gate, SOFT_GATE_FORKED);
}

static aclError check_config(const char *path)              /* nothing in it concerns a software NPU, but a wrong path is a mistake */
{
    if (path && *path && access(path, R_OK))
        return soft_error(ACL_ERROR_INVALID_PARAM, "configPath %s: cannot be read", path);
    return ACL_SUCCESS;
}

static aclError initialize(const char *path)                /* locked */
{
    if (references) {
        references++;                                       /* counted all the same: every aclInit has its aclFinalize */
        return soft_error(ACL_ERROR_REPEAT_INITIALIZE, "aclInit was called before in this process; this may be ignored");
    }
    SOFT_TRY(check_config(path));
    SOFT_TRY(soft_settings_read());
    SOFT_TRY(soft_fault_init());
    if (!was_initialized && pthread_atfork(NULL, NULL, in_child))
        return soft_error(ACL_ERROR_BAD_ALLOC, "no host memory");
    soft_devices_init();
    was_initialized = true;
    references = 1;
    soft_initialized_set(true);
    return ACL_SUCCESS;
}

aclError aclInit(const char *configPath)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    pthread_mutex_lock(&lock);
    aclError code = initialize(configPath);
    pthread_mutex_unlock(&lock);
    return code;
}

/* The last call ends all contexts, aborting what still runs, and withdraws what was exported. Memory stays its owner's. */
static aclError finalize(uint64_t *left)                    /* locked */
{
    SOFT_TRY(soft_queue_outside());
    if (!references && was_initialized)
        return soft_error(ACL_ERROR_REPEAT_FINALIZE, "aclFinalize was called once for every aclInit already");
    if (!references)
        return soft_error(ACL_ERROR_UNINITIALIZE, "aclInit has not been called");
    if (references == 1) {
        soft_devices_shutdown();
        soft_reporters_shutdown();
        soft_share_shutdown();
        soft_initialized_set(false);
    }
    references--;
    if (left)
        *left = references;
    return ACL_SUCCESS;
}

aclError aclFinalizeReference(uint64_t *refCount)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    pthread_mutex_lock(&lock);
    aclError code = finalize(refCount);
    pthread_mutex_unlock(&lock);
    return code;
}

aclError aclFinalize(void)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    pthread_mutex_lock(&lock);
    aclError code = finalize(NULL);
    pthread_mutex_unlock(&lock);
    return code;
}

aclError aclrtGetVersion(int32_t *majorVersion, int32_t *minorVersion, int32_t *patchVersion)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    if (!majorVersion || !minorVersion || !patchVersion)
        return soft_null("a version argument");
    *majorVersion = 1;                                      /* the API version of the newest function we have */
    *minorVersion = 17;
    *patchVersion = 0;
    return ACL_SUCCESS;
}

static aclError check_package(const char *name, const void *out)
{
    static const char *const known[] = { "runtime", "hccl", "hcomm" };
    if (!name || !out)
        return soft_null(name ? "the result" : "pkgName");
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (!strncmp(name, known[i], strlen(known[i]) + 1))
            return ACL_SUCCESS;
    return soft_error(ACL_ERROR_INVALID_PARAM, "package '%.32s': known are runtime, hccl and hcomm", name);
}

aclError aclsysGetVersionNum(char *pkgName, int32_t *versionNum)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    SOFT_TRY(check_package(pkgName, versionNum));
    *versionNum = 90100000;                                 /* 9.1.0: the newest function we have came with it */
    return ACL_SUCCESS;
}

aclError aclsysGetVersionStr(char *pkgName, char *versionStr)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    SOFT_TRY(check_package(pkgName, versionStr));
    strcpy(versionStr, "9.1.0-softnpu");                    /* the caller gives 128 bytes */
    return ACL_SUCCESS;
}

const char *aclrtGetSocName(void)
{
    if (soft_fault(__func__, NULL))
        return NULL;
    switch (soft_setting.strict) {
    case SOFT_STRICT_HCCS:  return "Ascend910B1-softnpu";   /* an A2 has HCCS within a server */
    case SOFT_STRICT_AICPU: return "Ascend910_9391-softnpu";    /* an A3 has HCCS within a super pod */
    default:                return "SoftNPU";
    }
}

aclError aclrtGetRunMode(aclrtRunMode *runMode)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    if (!runMode)
        return soft_null("runMode");
    *runMode = ACL_HOST;
    return ACL_SUCCESS;
}
