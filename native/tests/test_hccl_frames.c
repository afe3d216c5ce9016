/* A peer that lies. Rank 0 prepares; in the place of rank 1 sits a socket that says what no rank would say. Whatever comes,
 * rank 0 gets an error soon, loses no descriptor, and can be prepared again.                                             */
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/un.h>
#include "hccl_pair.h"
#include "hccl_soft.h"

/* ---- finding rank 0's listening socket: of all names in this machine, the one that its process holds ---- */

static bool process_holds(pid_t pid, unsigned long inode)
{
    char path[300], target[64], want[64];
    bool found = false;
    snprintf(path, sizeof path, "/proc/%d/fd", pid);
    snprintf(want, sizeof want, "socket:[%lu]", inode);
    DIR *folder = opendir(path);
    for (struct dirent *entry; folder && (entry = readdir(folder)); ) {
        snprintf(path, sizeof path, "/proc/%d/fd/%s", pid, entry->d_name);
        ssize_t length = readlink(path, target, sizeof target - 1);
        target[length < 0 ? 0 : length] = 0;
        found |= !strcmp(target, want);
    }
    if (folder)
        closedir(folder);
    return found;
}

static bool find_name(pid_t pid, char name[128])
{
    char line[512];
    bool found = false;
    FILE *list = fopen("/proc/net/unix", "r");
    while (list && !found && fgets(line, sizeof line, list)) {
        unsigned long inode;
        char flags[16];
        if (sscanf(line, "%*s %*s %*s %15s %*s %*s %lu @%127s", flags, &inode, name) == 3 && !strncmp(name, "softnpu-hccl.",
            13))
            found = strcmp(flags, "00010000") == 0 && process_holds(pid, inode);      /* listening */
    }
    if (list)
        fclose(list);
    return found;
}

static int connect_to(pid_t pid, hccl_key *key)
{
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    char name[128];
    unsigned long long words[2];
    while (!find_name(pid, name))
        poll(NULL, 0, 1);
    sscanf(name, "softnpu-hccl.%*u.%16llx%16llx", &words[0], &words[1]);
    *key = (hccl_key){ { words[0], words[1] } };
    strcpy(address.sun_path + 1, name);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET, 0);
    if (connect(fd, (struct sockaddr *)&address, (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + strlen(name))))
        CHECK_EQ(errno, 0);
    return fd;
}

/* ---- saying things ---- */

static void send_with(int fd, const hccl_message *message, size_t length)
{
    struct iovec part = { (void *)message, length };
    union { struct cmsghdr align; char bytes[CMSG_SPACE(sizeof message->fds)]; } control;
    struct msghdr out = { .msg_iov = &part, .msg_iovlen = 1 };
    if (message->nfds) {
        out.msg_control = &control;
        out.msg_controllen = CMSG_SPACE((size_t)message->nfds * sizeof(int));
        struct cmsghdr *rights = CMSG_FIRSTHDR(&out);
        *rights = (struct cmsghdr){ .cmsg_len = CMSG_LEN((size_t)message->nfds * sizeof(int)), .cmsg_level = SOL_SOCKET,
                .cmsg_type = SCM_RIGHTS };
        memcpy(CMSG_DATA(rights), message->fds, (size_t)message->nfds * sizeof(int));
    }
    sendmsg(fd, &out, MSG_NOSIGNAL);
}

static hccl_message new_message(uint16_t kind, uint16_t flags, uint32_t count)
{
    hccl_message message;
    memset(&message, 0, sizeof message);
    message.head = (hccl_head){ HCCL_MAGIC, kind, flags, count, 0 };
    return message;
}

static void say_hello(int fd, hccl_hello hello)
{
    hccl_message message = new_message(HCCL_HELLO, 0, 1);
    message.body.hello = hello;
    send_with(fd, &message, sizeof(hccl_head) + sizeof(hccl_hello));
}

static void say_regions(int fd, const hccl_wire_region *regions, uint32_t count, uint16_t flags, int nfds, int passed)
{
    hccl_message message = new_message(HCCL_REGIONS, flags, count);
    for (uint32_t i = 0; i < count; i++)
        message.body.regions[i] = regions[i];
    for (message.nfds = 0; message.nfds < nfds; message.nfds++)
        message.fds[message.nfds] = passed;
    send_with(fd, &message, sizeof(hccl_head) + count * sizeof *regions);
}

static void say_region(int fd, uint64_t base, uint64_t size, int type)
{
    hccl_wire_region region = { 1, base, size, 0, type, 0 };
    say_regions(fd, &region, 1, HCCL_PREPARE | HCCL_LAST, 0, -1);
}

static void say_shared(int fd, uint64_t size, int nfds, uint32_t shared, int passed)
{
    hccl_wire_region region = { 1, 1 << 20, size, 0, COMM_MEM_TYPE_DEVICE, shared };
    say_regions(fd, &region, 1, HCCL_PREPARE | HCCL_LAST, nfds, passed);
    if (passed >= 0)
        close(passed);
}

/* ---- lies instead of regions ---- */

static void nothing(int fd) { (void)fd; }
static void noise(int fd) { send(fd, "noise noise noise noise noise noise", 36, MSG_NOSIGNAL); }
static void one_byte(int fd) { send(fd, "x", 1, MSG_NOSIGNAL); }
static void huge(int fd) { static char bytes[100000]; send(fd, bytes, sizeof bytes, MSG_NOSIGNAL); }
static void empty_size(int fd) { say_region(fd, 1 << 20, 0, COMM_MEM_TYPE_HOST); }
static void null_base(int fd) { say_region(fd, 0, 4096, COMM_MEM_TYPE_HOST); }
static void wraps(int fd) { say_region(fd, UINT64_MAX - 100, 4096, COMM_MEM_TYPE_HOST); }
static void too_large(int fd) { say_region(fd, 1 << 20, UINT64_MAX / 2, COMM_MEM_TYPE_HOST); }
static void strange_type(int fd) { say_region(fd, 1 << 20, 4096, 77); }
static void unmapped(int fd) { say_region(fd, 4096, 4096, COMM_MEM_TYPE_HOST); }
static void no_descriptor(int fd) { say_shared(fd, 4096, 0, 1, -1); }
static void unasked_descriptor(int fd) { say_shared(fd, 4096, 1, 0, memfd_create("x", 0)); }
static void two_descriptors(int fd) { say_shared(fd, 4096, 2, 1, memfd_create("x", 0)); }
static void not_memory(int fd) { say_shared(fd, 4096, 1, 1, open("/dev/null", O_RDWR)); }
static void exchange(int fd) { say_regions(fd, NULL, 0, HCCL_EXCHANGE | HCCL_LAST, 0, -1); }
static void empty_and_more(int fd) { say_regions(fd, NULL, 0, HCCL_PREPARE, 0, -1); }

static void unsealed(int fd)
{
    int memory = memfd_create("x", MFD_ALLOW_SEALING);
    CHECK_EQ(ftruncate(memory, 4096), 0);
    say_shared(fd, 4096, 1, 1, memory);
}

static void shorter_than_said(int fd)
{
    int memory = memfd_create("x", MFD_ALLOW_SEALING);
    CHECK_EQ(ftruncate(memory, 4096), 0);
    fcntl(memory, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW);
    say_shared(fd, 1 << 30, 1, 1, memory);
}

static void overlapping(int fd)
{
    hccl_wire_region regions[2] = { { 1, 1 << 20, 4096, 0, 0, 0 }, { 2, (1 << 20) + 4095, 4096, 0, 0, 0 } };
    say_regions(fd, regions, 2, HCCL_PREPARE | HCCL_LAST, 0, -1);
}

static void wrong_count(int fd)
{
    hccl_message message = new_message(HCCL_REGIONS, HCCL_PREPARE | HCCL_LAST, UINT32_MAX);
    send_with(fd, &message, sizeof(hccl_head) + sizeof(hccl_wire_region));
}

static void descriptors(int fd)
{
    hccl_message message = new_message(HCCL_DESCRIPTORS, HCCL_PREPARE | HCCL_LAST, 0);
    send_with(fd, &message, sizeof(hccl_head));
}

static void status(int fd, int32_t code)
{
    hccl_message message = new_message(HCCL_STATUS, 0, 0);
    message.head.status = code;
    send_with(fd, &message, sizeof(hccl_head));
}

static void no_support(int fd) { status(fd, HCCL_E_NOT_SUPPORT); }
static void gave_up(int fd) { status(fd, HCCL_E_TIMEOUT); }
static void strange_status(int fd) { status(fd, 123456); }

static void endless(int fd)
{
    hccl_wire_region regions[HCCL_MESSAGE_REGIONS];
    for (uint64_t id = 1; id <= HCCL_REGIONS_MAX + 1; id += HCCL_MESSAGE_REGIONS) {
        for (uint64_t i = 0; i < HCCL_MESSAGE_REGIONS; i++)
            regions[i] = (hccl_wire_region){ id + i, (id + i) * 4096, 1, 0, COMM_MEM_TYPE_HOST, 0 };
        say_regions(fd, regions, HCCL_MESSAGE_REGIONS, HCCL_PREPARE, 0, -1);
    }
}

static const struct lie { const char *name; void (*tell_it)(int fd); HcclResult want; } lies[] = {
    { "nothing", nothing, HCCL_E_UNAVAIL },
    { "noise", noise, HCCL_E_INTERNAL },
    { "one byte", one_byte, HCCL_E_INTERNAL },
    { "a huge message", huge, HCCL_E_INTERNAL },
    { "an empty region", empty_size, HCCL_E_INTERNAL },
    { "a region at NULL", null_base, HCCL_E_INTERNAL },
    { "a region that wraps around", wraps, HCCL_E_INTERNAL },
    { "a region without limits", too_large, HCCL_E_INTERNAL },
    { "a region of no type", strange_type, HCCL_E_INTERNAL },
    { "a region that is not mapped", unmapped, HCCL_E_INTERNAL },
    { "overlapping regions", overlapping, HCCL_E_INTERNAL },
    { "a wrong count", wrong_count, HCCL_E_INTERNAL },
    { "a missing descriptor", no_descriptor, HCCL_E_INTERNAL },
    { "a descriptor too many", unasked_descriptor, HCCL_E_INTERNAL },
    { "two for one", two_descriptors, HCCL_E_MEMORY },
    { "a device for memory", not_memory, HCCL_E_MEMORY },
    { "memory that can shrink", unsealed, HCCL_E_MEMORY },
    { "memory that is too short", shorter_than_said, HCCL_E_MEMORY },
    { "another call's message", exchange, HCCL_E_INTERNAL },
    { "another message", descriptors, HCCL_E_INTERNAL },
    { "nothing, and more to come", empty_and_more, HCCL_E_INTERNAL },
    { "its own failure", no_support, HCCL_E_NOT_SUPPORT },
    { "its own timeout", gave_up, HCCL_E_UNAVAIL },
    { "a failure that does not exist", strange_status, HCCL_E_INTERNAL },
    { "regions without end", endless, HCCL_E_INTERNAL },
};
enum { LIES = sizeof lies / sizeof *lies };

static void liar(int other, pid_t victim)
{
    for (int i = 0; i < LIES; i++) {
        hccl_key key;
        hccl_message reply;
        int fd = connect_to(victim, &key);
        say_hello(fd, (hccl_hello){ key, 1, 0, 2, 1 });
        CHECK(recv(fd, &reply, sizeof reply, 0) == sizeof(hccl_head) + sizeof(hccl_hello));
        lies[i].tell_it(fd);
        if (lies[i].tell_it == nothing)
            close(fd);
        in_step(other);
        if (lies[i].tell_it != nothing)
            close(fd);
    }
}

static void victim_of_lies(HcclComm comm, int other)
{
    int before = open_descriptors();
    for (int i = 0; i < LIES; i++) {
        double start = seconds_now();
        HcclResult code = prepare(comm, 60);
        if (code != lies[i].want)
            printf("%s: %d, want %d (%s)\n", lies[i].name, (int)code, (int)lies[i].want, aclGetRecentErrMsg());
        CHECK_EQ(code, lies[i].want);
        CHECK(seconds_now() - start < 30);
        CHECK_EQ(open_descriptors(), before + 1);           /* the link, hung up and kept until the next attempt */
        softnpu_counters counters;
        softnpu_get_counters(&counters);
        CHECK_EQ(counters.imported, 0);
        in_step(other);
    }
}

static void lying(uint32_t rank, int other)
{
    pid_t victim = getpid();
    if (rank == 0) {
        HcclComm comm = new_one_sided("lies", rank);
        tell(other, &victim, sizeof victim);
        victim_of_lies(comm, other);
        CHECK_OK(HcclCommDestroy(comm));
    } else {
        hear(other, &victim, sizeof victim);
        liar(other, victim);
    }
}

TEST(test_lies_about_memory)
{
    run_pair(lying);
}

/* ---- strangers at the door ---- */

static void knock(pid_t victim, int which)
{
    hccl_key key;
    int fd = connect_to(victim, &key);
    hccl_hello hello = { key, 1, 0, 2, 1 };
    switch (which) {
    case 0: noise(fd); break;
    case 1: huge(fd); break;
    case 2: no_support(fd); break;
    case 3: hello.key.word[0]++; say_hello(fd, hello); break;
    case 4: hello.to = 1; say_hello(fd, hello); break;
    default: break;                                         /* gone before it said anything */
    }
    if (which < 5) {
        struct pollfd closed = { fd, POLLIN, 0 };
        poll(&closed, 1, 20000);                            /* the door is shut in our face */
    }
    close(fd);
}

static void strangers(uint32_t rank, int other)
{
    pid_t victim = getpid();
    HcclComm comm = new_one_sided("strangers", rank);
    if (rank == 0) {
        tell(other, &victim, sizeof victim);
    } else {
        hear(other, &victim, sizeof victim);
        for (int which = 0; which < 6; which++)
            knock(victim, which);
    }
    CHECK_OK(prepare(comm, 60));                            /* after all that, the real rank 1 is let in */
    in_step(other);
    CHECK_OK(HcclCommDestroy(comm));
}

TEST(test_strangers_at_the_door_do_not_keep_the_peer_out)
{
    run_pair(strangers);
}

/* ---- an end whose time is over while the other is at work ---- */

static int enter(pid_t victim)
{
    hccl_key key;
    hccl_message reply;
    int fd = connect_to(victim, &key);
    say_hello(fd, (hccl_hello){ key, 1, 0, 2, 1 });
    CHECK(recv(fd, &reply, sizeof reply, 0) == sizeof(hccl_head) + sizeof(hccl_hello));
    return fd;
}

static void lopsided(uint32_t rank, int other)
{
    pid_t victim = getpid();
    HcclComm comm = new_one_sided("lopsided", rank);
    if (rank == 0) {
        tell(other, &victim, sizeof victim);
        CHECK_ERR(prepare(comm, 1), HCCL_E_TIMEOUT);        /* the peer is slow: it has not described its memory yet */
        in_step(other);
        CHECK_ERR(prepare(comm, 60), HCCL_E_UNAVAIL);       /* the peer's time is over while we wait for it */
    } else {
        hear(other, &victim, sizeof victim);
        int slow = enter(victim);
        in_step(other);
        close(slow);
        close(enter(victim));
    }
    CHECK_OK(prepare(comm, 60));
    in_step(other);
    CHECK_OK(HcclCommDestroy(comm));
}

TEST(test_a_prepare_that_one_end_gave_up_in_the_middle_can_be_made_again_by_both)
{
    run_pair(lopsided);
}

static void disagreeing(uint32_t rank, int other)
{
    pid_t victim = getpid();
    HcclComm comm = new_one_sided("disagreeing", rank);
    if (rank == 0) {
        tell(other, &victim, sizeof victim);
        CHECK_ERR(prepare(comm, 60), HCCL_E_PARA);
    } else {
        hccl_key key;
        hear(other, &victim, sizeof victim);
        int fd = connect_to(victim, &key);
        say_hello(fd, (hccl_hello){ key, 1, 0, 3, 1 });
        in_step(other);
        close(fd);
    }
    if (rank == 0)
        in_step(other);
    CHECK_OK(HcclCommDestroy(comm));
}

TEST(test_ranks_that_disagree_about_their_number)
{
    run_pair(disagreeing);
}

int main(void)
{
    RUN(test_lies_about_memory);
    RUN(test_strangers_at_the_door_do_not_keep_the_peer_out);
    RUN(test_a_prepare_that_one_end_gave_up_in_the_middle_can_be_made_again_by_both);
    RUN(test_ranks_that_disagree_about_their_number);
    return check_done();
}
