/* check.h: the smallest test harness that tells where and what.
 *
 *   TEST(name) { ... }            one case; RUN(name) in main runs it; main ends with `return check_done();`
 *   CHECK(cond), CHECK_EQ(a, b)   record a failure and go on; CHECK_OK(code) shows the runtime's message too
 *   start_peer / finish_peer      a second process: forked before aclInit, joined by a pair of sockets              */
#pragma once
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include "acl.h"
#include "softnpu/softnpu.h"

static _Atomic int check_failures;

#define TEST(name) static void name(void)
#define RUN(name) do { int before_ = check_failures; name(); \
        printf("%s %s\n", check_failures == before_ ? "ok  " : "FAIL", #name); fflush(stdout); } while (0)

#define CHECK(cond) do { if (!(cond)) { check_failures++; \
        printf("%s:%d: %s\n", __FILE__, __LINE__, #cond); } } while (0)

#define CHECK_EQ(got, want) do { long long got_ = (long long)(got), want_ = (long long)(want); if (got_ != want_) { check_failures++; \
        printf("%s:%d: %s is %lld, want %s = %lld\n", __FILE__, __LINE__, #got, got_, #want, want_); } } while (0)

#define CHECK_OK(call) do { int code_ = (int)(call); if (code_) { const char *why_ = aclGetRecentErrMsg(); check_failures++; \
        printf("%s:%d: %s is %d (%s)\n", __FILE__, __LINE__, #call, code_, why_ ? why_ : "no message"); } } while (0)

/* The code, and that a message came with it. */
#define CHECK_ERR(call, want) do { aclGetRecentErrMsg(); CHECK_EQ(call, want); CHECK(aclGetRecentErrMsg() != NULL); } while (0)

static inline int check_done(void)
{
    if (check_failures)
        printf("%d checks failed\n", check_failures);
    return check_failures ? 1 : 0;
}

typedef struct check_peer { pid_t pid; int socket; } check_peer;

/* Runs `body` in a child process. Call it before aclInit: a forked runtime is of no use. */
static inline check_peer start_peer(void (*body)(int socket))
{
    int pair[2];
    check_peer peer = { -1, -1 };
    if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair))
        abort();
    fflush(stdout);
    peer.pid = fork();
    if (peer.pid == 0) {
        close(pair[0]);
        body(pair[1]);
        fflush(stdout);
        _exit(check_failures ? 1 : 0);
    }
    close(pair[1]);
    peer.socket = pair[0];
    return peer;
}

static inline void finish_peer(check_peer peer)
{
    int status = -1;
    close(peer.socket);
    waitpid(peer.pid, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static inline void tell(int socket, const void *bytes, size_t size)
{
    CHECK_EQ(send(socket, bytes, size, MSG_NOSIGNAL), size);
}

static inline void hear(int socket, void *bytes, size_t size)
{
    CHECK_EQ(recv(socket, bytes, size, 0), size);
}
