/* A process that answers importers and lies: nothing of it may be mapped. */
#include "check.h"
#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/un.h>
#include "share.h"

enum { SIZE = 1 << 20 };
enum { TRUTH, UNSEALED, TOO_SHORT, NO_MEMORY, FAR_OFFSET, EMPTY, NO_DESCRIPTOR, HALF_A_REPLY, SILENCE, LIES };

static uint64_t key_of(pid_t pid, uint64_t lie)
{
    return (uint64_t)pid << 42 | lie;                       /* listener 0; the token says which lie we want to hear */
}

static int memory(size_t size, bool sealed)
{
    int fd = memfd_create("liar", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    CHECK(fd >= 0 && ftruncate(fd, (off_t)size) == 0);
    if (sealed)
        CHECK(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK) == 0);
    return fd;
}

static int descriptor_for(uint64_t lie, soft_share_reply *reply)
{
    switch (lie) {
    case UNSEALED:      return memory(SIZE, false);
    case TOO_SHORT:     return memory(SIZE - 4096, true);
    case NO_MEMORY:     return eventfd(0, EFD_CLOEXEC);
    case FAR_OFFSET:    reply->what.offset = UINT64_MAX - 4096; return memory(SIZE, true);
    case EMPTY:         reply->what.size = 0; return memory(SIZE, true);
    case NO_DESCRIPTOR: return -1;
    }
    return memory(SIZE, true);
}

static void send_reply(int socket, const soft_share_reply *reply, size_t size, int fd)
{
    union { struct cmsghdr header; char bytes[CMSG_SPACE(sizeof(int))]; } control = { .bytes = { 0 } };
    struct iovec data = { (void *)(uintptr_t)reply, size };
    struct msghdr message = { .msg_iov = &data, .msg_iovlen = 1 };
    if (fd >= 0) {
        message.msg_control = control.bytes;
        message.msg_controllen = sizeof control.bytes;
        *CMSG_FIRSTHDR(&message) = (struct cmsghdr){ .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof fd) };
        memcpy(CMSG_DATA(CMSG_FIRSTHDR(&message)), &fd, sizeof fd);
    }
    CHECK(sendmsg(socket, &message, MSG_NOSIGNAL) >= 0);
}

static void lie_once(int listener)
{
    soft_share_request request;
    int socket = accept(listener, NULL, NULL);
    CHECK_EQ(recv(socket, &request, sizeof request, 0), sizeof request);
    uint64_t lie = request.key & 0xff;
    soft_share_reply reply = { .what = { request.kind, 1, 0, SIZE } };
    int fd = descriptor_for(lie, &reply);
    if (lie != SILENCE)
        send_reply(socket, &reply, lie == HALF_A_REPLY ? sizeof reply / 2 : sizeof reply, fd);
    if (fd >= 0)
        close(fd);
    close(socket);
}

static void be_a_liar(int parent)
{
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    int length = snprintf(address.sun_path + 1, sizeof address.sun_path - 1, "softnpu-%d-0", getpid());
    int listener = socket(AF_UNIX, SOCK_SEQPACKET, 0);
    CHECK(bind(listener, (struct sockaddr *)&address, (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length)) == 0);
    CHECK(listen(listener, 8) == 0);
    char ready = 1;
    tell(parent, &ready, 1);
    for (char more = 1; hear(parent, &more, 1), more; )
        lie_once(listener);
}

static check_peer peer;
static int first_free;                                      /* the lowest descriptor not in use before anything was imported */

static int lowest_descriptor(void)
{
    int fd = eventfd(0, EFD_CLOEXEC);
    close(fd);
    return fd;
}

static aclError import(uint64_t lie, void **addr)
{
    char key[65], more = 1;
    snprintf(key, sizeof key, "softnpu:%016llx", (unsigned long long)key_of(peer.pid, lie));
    tell(peer.socket, &more, 1);
    aclError code = aclrtIpcMemImportByKey(addr, key, 0);
    if (code == ACL_SUCCESS)
        CHECK_OK(aclrtIpcMemClose(key));
    return code;
}

TEST(test_lies_about_memory_are_noticed)
{
    static const aclError want[LIES] = {
        [TRUTH] = ACL_SUCCESS, [UNSEALED] = ACL_ERROR_RT_PARAM_INVALID, [TOO_SHORT] = ACL_ERROR_RT_PARAM_INVALID,
        [NO_MEMORY] = ACL_ERROR_RT_PARAM_INVALID, [FAR_OFFSET] = ACL_ERROR_RT_PARAM_INVALID, [EMPTY] = ACL_ERROR_RT_PARAM_INVALID,
        [NO_DESCRIPTOR] = ACL_ERROR_RT_IPC_ERROR, [HALF_A_REPLY] = ACL_ERROR_RT_IPC_ERROR, [SILENCE] = ACL_ERROR_RT_IPC_ERROR,
    };
    for (uint64_t lie = TRUTH; lie < LIES; lie++) {
        void *addr = NULL;
        aclError code = import(lie, &addr);
        if (code != want[lie])
            printf("lie %d\n", (int)lie);
        CHECK_EQ(code, want[lie]);
        CHECK((addr != NULL) == (code == ACL_SUCCESS));
    }
}

TEST(test_lies_about_events_notifies_and_physical_memory_are_noticed)
{
    void *made = NULL;
    char more = 1;
    aclrtIpcEventHandle event = { { 0 } };
    snprintf(event.reserved, sizeof event.reserved, "softnpu:%016llx", (unsigned long long)key_of(peer.pid, UNSEALED));
    tell(peer.socket, &more, 1);
    CHECK_ERR(aclrtIpcOpenEventHandle(event, &made), ACL_ERROR_RT_PARAM_INVALID);
    tell(peer.socket, &more, 1);
    CHECK_ERR(aclrtMemImportFromShareableHandle(key_of(peer.pid, TOO_SHORT), 0, &made), ACL_ERROR_RT_PARAM_INVALID);
    tell(peer.socket, &more, 1);
    CHECK_ERR(aclrtNotifyImportByKey(&made, event.reserved, 0), ACL_ERROR_RT_PARAM_INVALID);       /* memory for an eventfd */
    CHECK(made == NULL);
}

TEST(test_nothing_is_left_behind)
{
    softnpu_counters counters;
    softnpu_get_counters(&counters);
    CHECK_EQ(counters.imported + counters.events + counters.allocations, 0);
    CHECK_EQ(lowest_descriptor(), first_free);              /* every descriptor that was refused was closed */
}

int main(void)
{
    char ready, quit = 0;
    peer = start_peer(be_a_liar);
    hear(peer.socket, &ready, 1);
    CHECK_OK(aclInit(NULL));
    CHECK_OK(aclrtSetDevice(0));
    first_free = lowest_descriptor();
    RUN(test_lies_about_memory_are_noticed);
    RUN(test_lies_about_events_notifies_and_physical_memory_are_noticed);
    RUN(test_nothing_is_left_behind);
    tell(peer.socket, &quit, 1);
    finish_peer(peer);
    CHECK_OK(aclrtResetDevice(0));
    CHECK_OK(aclFinalize());
    return check_done();
}
