/*
 * An emulated Ascend driver: lets the unmodified MemCache pool run on a host without an NPU.
 *
 * Device memory is ordinary host memory, copies are memmove, and a device is a number. Every other
 * entry point that MemCache and MemFabric look up answers success and does nothing. One shared object
 * serves under all the library names that they open (see build.py).
 *
 * It is for development and tests. It emulates no timing, no transport and no error of real hardware.
 *
 * KVTIERD_EMULATOR_TRACE=1 in the environment prints the name of every call to stderr.
 * KVTIERD_EMULATOR_SOC sets the chip name; the default is an 800I A2's.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* Error numbers as the real libraries use them: ACL's own and the driver's. */
enum {
    OK = 0,
    ACL_INVALID_PARAM = 107000,
    ACL_OUT_OF_MEMORY = 207001,
    DRV_INVALID_VALUE = 3,
    DRV_OUT_OF_MEMORY = 6,
};

#define HUGE_PAGE_BYTES ((size_t)2 << 20)
#define API __attribute__((visibility("default")))

static void trace(const char *name)
{
    static int enabled = -1; /* racing threads compute the same value */
    if (enabled < 0)
        enabled = getenv("KVTIERD_EMULATOR_TRACE") != NULL;
    if (enabled)
        fprintf(stderr, "ascend emulator: %s\n", name);
}
#define TRACE() trace(__func__)

/*
 * ---- Devices, versions, contexts ----------------------------------------------------------------
 * A device is remembered per thread, as the real runtime does. Logical, user and physical device
 * numbers are all the same here.
 */
static __thread int32_t current_device;
static int the_context;

API int32_t aclrtSetDevice(int32_t device) { TRACE(); current_device = device; return OK; }
API int32_t aclrtGetDevice(int32_t *device) { TRACE(); *device = current_device; return OK; }
API int32_t aclrtGetCurrentContext(void **context) { TRACE(); *context = &the_context; return OK; }
API int32_t aclrtGetPhyDevIdByLogicDevId(int32_t logic, int32_t *physical) { TRACE(); *physical = logic; return OK; }
API int32_t rtGetLogicDevIdByUserDevId(int32_t user, int32_t *logic) { TRACE(); *logic = user; return OK; }
API int32_t rtDeviceGetBareTgid(uint32_t *tgid) { TRACE(); *tgid = (uint32_t)getpid(); return OK; }

API int32_t rtGetDeviceInfo(uint32_t device, int32_t module, int32_t info, int64_t *value)
{
    TRACE();
    (void)device, (void)module, (void)info;
    *value = 0;
    return OK;
}

API int32_t rtGetP2PStatus(uint32_t device, uint32_t peer, uint32_t *status)
{
    TRACE();
    (void)device, (void)peer;
    *status = 1; /* peers always reach each other */
    return OK;
}

API const char *aclrtGetSocName(void)
{
    const char *name = getenv("KVTIERD_EMULATOR_SOC");
    TRACE();
    return name && *name ? name : "Ascend910B3";
}

API int32_t aclrtGetVersion(int32_t *major, int32_t *minor, int32_t *patch)
{
    TRACE();
    *major = 1, *minor = 0, *patch = 0;
    return OK;
}

API int32_t aclsysGetVersionStr(char *package, char *version)
{
    TRACE();
    (void)package;
    strcpy(version, "8.5.0"); /* the caller's buffer holds 128 bytes by contract */
    return OK;
}

/*
 * ---- Streams and notifies -----------------------------------------------------------------------
 * Work is done inside the call that asks for it, so a stream is only a handle that can be freed.
 */
static int32_t new_handle(void **handle)
{
    *handle = calloc(1, 64);
    return *handle ? OK : ACL_OUT_OF_MEMORY;
}

API int32_t aclrtCreateStream(void **stream) { TRACE(); return new_handle(stream); }
API int32_t aclrtDestroyStream(void *stream) { TRACE(); free(stream); return OK; }
API int32_t aclrtDestroyNotify(void *notify) { TRACE(); free(notify); return OK; }

API int32_t aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flag)
{
    TRACE();
    (void)priority, (void)flag;
    return new_handle(stream);
}

API int32_t aclrtCreateNotify(void **notify, uint64_t flag)
{
    TRACE();
    (void)flag;
    return new_handle(notify);
}

API int32_t aclrtStreamGetId(void *stream, int32_t *id) { TRACE(); (void)stream; *id = 1; return OK; }
API int32_t aclrtGetNotifyId(void *notify, uint32_t *id) { TRACE(); (void)notify; *id = 1; return OK; }

/*
 * ---- Memory: allocation and copies --------------------------------------------------------------
 * Device and pinned host memory both come from the heap, aligned to 2 MiB as the driver does.
 */
static void *heap_alloc(size_t size)
{
    void *memory = NULL;
    return posix_memalign(&memory, HUGE_PAGE_BYTES, size ? size : 1) == 0 ? memory : NULL;
}

static int32_t copy(void *to, size_t room, const void *from, size_t size)
{
    if (size > room)
        return ACL_INVALID_PARAM;
    memmove(to, from, size);
    return OK;
}

static int32_t copy_rows(char *to, size_t to_pitch, const char *from, size_t from_pitch, size_t width, size_t rows)
{
    if (width > to_pitch || width > from_pitch)
        return ACL_INVALID_PARAM;
    for (size_t row = 0; row < rows; row++)
        memmove(to + row * to_pitch, from + row * from_pitch, width);
    return OK;
}

API int32_t aclrtMalloc(void **memory, size_t size, uint32_t policy)
{
    TRACE();
    (void)policy;
    *memory = heap_alloc(size);
    return *memory ? OK : ACL_OUT_OF_MEMORY;
}

API int32_t aclrtMallocHost(void **memory, size_t size)
{
    TRACE();
    *memory = heap_alloc(size);
    return *memory ? OK : ACL_OUT_OF_MEMORY;
}

API int32_t aclrtFree(void *memory) { TRACE(); free(memory); return OK; }
API int32_t aclrtFreeHost(void *memory) { TRACE(); free(memory); return OK; }

API int32_t aclrtMemset(void *to, size_t room, int32_t value, size_t size)
{
    TRACE();
    if (size > room)
        return ACL_INVALID_PARAM;
    memset(to, value, size);
    return OK;
}

API int32_t aclrtMemcpy(void *to, size_t room, const void *from, size_t size, uint32_t kind)
{
    TRACE();
    (void)kind;
    return copy(to, room, from, size);
}

API int32_t aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t size, uint32_t kind, void *stream)
{
    TRACE();
    (void)kind, (void)stream;
    return copy(to, room, from, size);
}

API int32_t rtMemcpyAsyncWithoutCheckKind(void *to, size_t room, const void *from, size_t size, uint32_t kind,
                                          void *stream)
{
    TRACE();
    (void)kind, (void)stream;
    return copy(to, room, from, size);
}

API int32_t aclrtMemcpy2d(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t rows,
                          uint32_t kind)
{
    TRACE();
    (void)kind;
    return copy_rows(to, to_pitch, from, from_pitch, width, rows);
}

API int32_t aclrtMemcpy2dAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                               size_t rows, uint32_t kind, void *stream)
{
    TRACE();
    (void)kind, (void)stream;
    return copy_rows(to, to_pitch, from, from_pitch, width, rows);
}

API int32_t aclrtMemcpyBatch(void **to, size_t *room, void **from, size_t *size, size_t count, void *attributes,
                             size_t *attribute_index, size_t attribute_count, size_t *failed)
{
    TRACE();
    (void)attributes, (void)attribute_index, (void)attribute_count;
    for (size_t i = 0; i < count; i++) {
        int32_t result = copy(to[i], room[i], from[i], size[i]);
        if (result != OK) {
            if (failed)
                *failed = i;
            return result;
        }
    }
    return OK;
}

API int32_t rtIpcSetMemoryName(const void *memory, uint64_t size, char *name, uint32_t room)
{
    TRACE();
    (void)size;
    if (!name || !room)
        return ACL_INVALID_PARAM;
    snprintf(name, room, "emulated-%d-%p", getpid(), memory);
    return OK;
}

/*
 * ---- Memory: address ranges and physical handles ------------------------------------------------
 * Reserve gives addresses without memory, create gives memory without an address (a memfd), map
 * joins them. The driver frees by start address alone, so the sizes are remembered here.
 */
struct extent {
    char *start;
    size_t size;
    struct extent *next;
};
struct physical {
    int fd;
    size_t size;
};
static pthread_mutex_t extents_lock = PTHREAD_MUTEX_INITIALIZER;
static struct extent *reservations, *mappings;

static int remember(struct extent **list, void *start, size_t size)
{
    struct extent *added = malloc(sizeof *added);
    if (!added)
        return 0;
    added->start = start;
    added->size = size;
    pthread_mutex_lock(&extents_lock);
    added->next = *list;
    *list = added;
    pthread_mutex_unlock(&extents_lock);
    return 1;
}

/* The size of the extent at start, which is forgotten; 0 when there is none. */
static size_t forget(struct extent **list, void *start)
{
    size_t size = 0;
    pthread_mutex_lock(&extents_lock);
    for (struct extent **at = list; *at; at = &(*at)->next) {
        if ((*at)->start == (char *)start) {
            struct extent *found = *at;
            size = found->size;
            *at = found->next;
            free(found);
            break;
        }
    }
    pthread_mutex_unlock(&extents_lock);
    return size;
}

API int halMemAddressReserve(void **address, size_t size, size_t alignment, void *wanted, uint64_t flag)
{
    TRACE();
    (void)alignment, (void)flag;
    void *range = mmap(wanted, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range == MAP_FAILED)
        return DRV_OUT_OF_MEMORY;
    if (!remember(&reservations, range, size)) {
        munmap(range, size);
        return DRV_OUT_OF_MEMORY;
    }
    *address = range;
    return OK;
}

API int halMemAddressFree(void *address)
{
    TRACE();
    size_t size = forget(&reservations, address);
    if (!size)
        return DRV_INVALID_VALUE;
    munmap(address, size);
    return OK;
}

API int halMemCreate(void **handle, size_t size, const void *properties, uint64_t flag)
{
    TRACE();
    (void)properties, (void)flag;
    struct physical *made = malloc(sizeof *made);
    if (!made)
        return DRV_OUT_OF_MEMORY;
    made->size = size;
    made->fd = memfd_create("ascend-emulator", MFD_CLOEXEC);
    if (made->fd < 0 || ftruncate(made->fd, (off_t)size) != 0) {
        if (made->fd >= 0)
            close(made->fd);
        free(made);
        return DRV_OUT_OF_MEMORY;
    }
    *handle = made;
    return OK;
}

API int halMemRelease(void *handle)
{
    TRACE();
    struct physical *made = handle;
    if (!made)
        return DRV_INVALID_VALUE;
    close(made->fd);
    free(made);
    return OK;
}

API int halMemMap(void *address, size_t size, size_t offset, void *handle, uint64_t flag)
{
    TRACE();
    (void)flag;
    struct physical *made = handle;
    if (!made || offset > made->size || size > made->size - offset)
        return DRV_INVALID_VALUE;
    if (mmap(address, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, made->fd, (off_t)offset) == MAP_FAILED)
        return DRV_OUT_OF_MEMORY;
    return remember(&mappings, address, size) ? OK : DRV_OUT_OF_MEMORY;
}

API int halMemUnmap(void *address)
{
    TRACE();
    size_t size = forget(&mappings, address);
    if (!size)
        return DRV_INVALID_VALUE;
    /* The range stays reserved: put an empty mapping in place of the memory. */
    void *empty = mmap(address, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    return empty == MAP_FAILED ? DRV_OUT_OF_MEMORY : OK;
}

API int halMemGetAllocationGranularity(const void *properties, int option, size_t *granularity)
{
    TRACE();
    (void)properties, (void)option;
    *granularity = HUGE_PAGE_BYTES;
    return OK;
}

API int halMemAlloc(void **memory, uint64_t size, uint64_t flag)
{
    TRACE();
    (void)flag;
    *memory = heap_alloc(size);
    return *memory ? OK : DRV_OUT_OF_MEMORY;
}

API int halMemFree(void *memory) { TRACE(); free(memory); return OK; }

API int halHostRegister(void *host, uint64_t size, uint32_t flag, uint32_t device, void **mapped)
{
    TRACE();
    (void)size, (void)flag, (void)device;
    *mapped = host; /* the device sees host memory at the same address */
    return OK;
}

/* The caller's zeroed answer already says "ordinary memory of device 0". */
API int drvMemGetAttribute(uint64_t address, void *attributes) { TRACE(); (void)address, (void)attributes; return OK; }

/*
 * ---- Entry points that only have to exist -------------------------------------------------------
 * MemFabric refuses a library that lacks any of them, and either calls none of them with protocol
 * host_shm or is content with success. They take no parameters here: the callee never reads them.
 */
#define SUCCEEDS(name) API int name(void) { TRACE(); return OK; }

/* Kernel launches, tensors, peers: the copy kernels of the device protocols. */
SUCCEEDS(aclCreateTensor)
SUCCEEDS(aclDestroyTensor)
SUCCEEDS(aclnnShmemSdmaStarsQuery)
SUCCEEDS(aclnnShmemSdmaStarsQueryGetWorkspaceSize)
SUCCEEDS(aclrtBinaryGetFunction)
SUCCEEDS(aclrtBinaryLoadFromFile)
SUCCEEDS(aclrtDeviceEnablePeerAccess)
SUCCEEDS(aclrtKernelArgsAppend)
SUCCEEDS(aclrtKernelArgsFinalize)
SUCCEEDS(aclrtKernelArgsInit)
SUCCEEDS(aclrtLaunchKernelWithConfig)
SUCCEEDS(aclrtSetStreamAttribute)
SUCCEEDS(aclrtStreamAbort)
SUCCEEDS(aclrtSynchronizeStream)
SUCCEEDS(aclrtWaitAndResetNotify)

/* Runtime: peer access, memory shared between processes, queue numbers of a stream. */
SUCCEEDS(rtDisableP2P)
SUCCEEDS(rtEnableP2P)
SUCCEEDS(rtGetDevResAddress)
SUCCEEDS(rtIpcCloseMemory)
SUCCEEDS(rtIpcDestroyMemoryName)
SUCCEEDS(rtIpcOpenMemory)
SUCCEEDS(rtSetIpcMemorySuperPodPid)
SUCCEEDS(rtStreamGetCqid)
SUCCEEDS(rtStreamGetSqid)

/* Driver (hal, drv): queues, resources, memory handles shared between processes. */
SUCCEEDS(drvNotifyIdAddrOffset)
SUCCEEDS(halCqReportRecv)
SUCCEEDS(halHostUnregisterEx)
SUCCEEDS(halMemExportToShareableHandleV2)
SUCCEEDS(halMemImportFromShareableHandleV2)
SUCCEEDS(halMemRetainAllocationHandle)
SUCCEEDS(halMemSetAccess)
SUCCEEDS(halMemShareHandleSetAttribute)
SUCCEEDS(halMemTransShareableHandle)
SUCCEEDS(halResourceConfig)
SUCCEEDS(halResourceDetailQuery)
SUCCEEDS(halResourceIdAlloc)
SUCCEEDS(halResourceIdFree)
SUCCEEDS(halSqCqAllocate)
SUCCEEDS(halSqCqFree)
SUCCEEDS(halSqCqQuery)
SUCCEEDS(halSqTaskSend)

/* Driver internals that MemFabric reaches into: the heaps of the device memory manager. */
API int g_devmm_mem_dev = -1; /* the memory manager's device file: none */
SUCCEEDS(devmm_alloc_rbtree_node)
SUCCEEDS(devmm_assign_rbtree_node_data)
SUCCEEDS(devmm_free_rbtree_node)
SUCCEEDS(devmm_get_heap_list_by_type)
SUCCEEDS(devmm_ioctl_enable_heap)
SUCCEEDS(devmm_ioctl_free_pages)
SUCCEEDS(devmm_rbtree_erase_idle_size_tree)
SUCCEEDS(devmm_rbtree_erase_idle_va_tree)
SUCCEEDS(devmm_rbtree_get_alloced_node_in_range)
SUCCEEDS(devmm_rbtree_get_idle_va_node_in_range)
SUCCEEDS(devmm_rbtree_insert_alloced_tree)
SUCCEEDS(devmm_rbtree_insert_idle_size_tree)
SUCCEEDS(devmm_rbtree_insert_idle_va_tree)
SUCCEEDS(devmm_va_to_heap)
SUCCEEDS(devmm_va_to_heap_idx)
SUCCEEDS(devmm_virt_alloc_mem_from_base)
SUCCEEDS(devmm_virt_destroy_heap)
SUCCEEDS(devmm_virt_get_heap_from_queue)
SUCCEEDS(devmm_virt_get_heap_mgmt)
SUCCEEDS(devmm_virt_normal_heap_update_info)
SUCCEEDS(devmm_virt_set_heap_idle)
SUCCEEDS(svm_module_alloced_size_inc)

/* Device management: PCIe and affinity facts, asked for on 950 only. */
SUCCEEDS(dcmiv2_get_affinity_cpu_info_by_dev_id)
SUCCEEDS(dcmiv2_get_device_pcie_info)
SUCCEEDS(dcmiv2_get_eid_list_by_urma_dev_index)
SUCCEEDS(dcmiv2_get_urma_device_cnt)
SUCCEEDS(dcmiv2_init)

/* The task scheduler on the device. */
SUCCEEDS(TsdOpen)

/* RDMA of the NPU's own network card (libra): protocol device_rdma. Old and new spelling. */
#define SUCCEEDS_TWICE(camel, snake) SUCCEEDS(camel) SUCCEEDS(snake)
SUCCEEDS_TWICE(RaAiQpCreate, ra_ai_qp_create)
SUCCEEDS_TWICE(RaDeregisterMr, ra_deregister_mr)
SUCCEEDS_TWICE(RaGetIfaddrs, ra_get_ifaddrs)
SUCCEEDS_TWICE(RaGetIfnum, ra_get_ifnum)
SUCCEEDS_TWICE(RaGetNotifyBaseAddr, ra_get_notify_base_addr)
SUCCEEDS_TWICE(RaGetNotifyMrInfo, ra_get_notify_mr_info)
SUCCEEDS_TWICE(RaGetQpStatus, ra_get_qp_status)
SUCCEEDS_TWICE(RaGetSockets, ra_get_sockets)
SUCCEEDS_TWICE(RaInit, ra_init)
SUCCEEDS_TWICE(RaQpConnectAsync, ra_qp_connect_async)
SUCCEEDS_TWICE(RaQpCreate, ra_qp_create)
SUCCEEDS_TWICE(RaQpCreateWithAttrs, ra_qp_create_with_attrs)
SUCCEEDS_TWICE(RaQpDestroy, ra_qp_destroy)
SUCCEEDS_TWICE(RaRdevGetHandle, ra_rdev_get_handle)
SUCCEEDS_TWICE(RaRdevInitV2, ra_rdev_init_v2)
SUCCEEDS_TWICE(RaRegisterMr, ra_register_mr)
SUCCEEDS_TWICE(RaSendWr, ra_send_wr)
SUCCEEDS_TWICE(RaSendWrV2, ra_send_wr_v2)
SUCCEEDS_TWICE(RaSetQpAttrQos, ra_set_qp_attr_qos)
SUCCEEDS_TWICE(RaSocketBatchClose, ra_socket_batch_close)
SUCCEEDS_TWICE(RaSocketBatchConnect, ra_socket_batch_connect)
SUCCEEDS_TWICE(RaSocketDeinit, ra_socket_deinit)
SUCCEEDS_TWICE(RaSocketInit, ra_socket_init)
SUCCEEDS_TWICE(RaSocketListenStart, ra_socket_listen_start)
SUCCEEDS_TWICE(RaSocketListenStop, ra_socket_listen_stop)
SUCCEEDS_TWICE(RaSocketWhiteListAdd, ra_socket_white_list_add)
SUCCEEDS_TWICE(RaSocketWhiteListDel, ra_socket_white_list_del)
SUCCEEDS(RaRdevInit)
SUCCEEDS(RaSocketBatchConnectLegacy)

/* Collective communication (libhccl, libhcomm): protocols device_urma and device_uboe. */
SUCCEEDS(HcclCommDestroy)
SUCCEEDS(HcclCommInitClusterInfoMemConfig)
SUCCEEDS(HcommBatchModeEnd)
SUCCEEDS(HcommBatchModeStart)
SUCCEEDS(HcommBatchTransferOnThread)
SUCCEEDS(HcommChannelCreate)
SUCCEEDS(HcommChannelDestroy)
SUCCEEDS(HcommChannelFence)
SUCCEEDS(HcommChannelFenceOnThread)
SUCCEEDS(HcommChannelGetStatus)
SUCCEEDS(HcommChannelUpdateMemInfo)
SUCCEEDS(HcommEndpointCreate)
SUCCEEDS(HcommEndpointDestroy)
SUCCEEDS(HcommEndpointGetListenPort)
SUCCEEDS(HcommMemExport)
SUCCEEDS(HcommMemGetAllMemHandles)
SUCCEEDS(HcommMemImport)
SUCCEEDS(HcommMemReg)
SUCCEEDS(HcommMemUnimport)
SUCCEEDS(HcommMemUnreg)
SUCCEEDS(HcommReadNbi)
SUCCEEDS(HcommReadNbiOnThread)
SUCCEEDS(HcommReadOnThread)
SUCCEEDS(HcommThreadAlloc)
SUCCEEDS(HcommThreadFree)
SUCCEEDS(HcommWriteNbi)
SUCCEEDS(HcommWriteNbiOnThread)
SUCCEEDS(HcommWriteOnThread)
