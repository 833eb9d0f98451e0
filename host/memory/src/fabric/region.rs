//! Memory of equal blocks, with leases that keep readers and writers apart.
#![expect(unsafe_code, reason = "peers and the operating system read and write the blocks by address")]

use std::alloc::{Layout, alloc, dealloc};
use std::fmt;
use std::fs::File;
use std::ops::{Deref, DerefMut};
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use thiserror::Error;

/// Whole pages, which registration needs anyway.
const ALIGNMENT: usize = 4096;
/// A large page of x86-64, and of aarch64 with pages of 4 KiB. The kernel copies from another process page by page: a region
/// of large pages is read faster.
const LARGE_PAGE: usize = 2 << 20;
const WRITTEN: u32 = u32::MAX;

/// Memory of equal blocks. A block is free, read by any number of leases, or written by one.
///
/// ```
/// use meridian_memory::fabric::{Region, RegionError};
///
/// let region = Region::allocate(4, 4096)?;
/// region.write(1)?.fill(9);
/// let lease = region.read(1)?;
/// assert_eq!(lease[0], 9);
/// assert_eq!(region.write(1).err(), Some(RegionError::InUse { index: 1 }));
/// drop(lease);
/// assert!(region.write(1).is_ok());
/// # Ok::<(), RegionError>(())
/// ```
pub struct Region {
    base: NonNull<u8>,
    blocks: u32,
    block_bytes: u32,
    /// Readers of each block, or [`WRITTEN`].
    leases: Box<[AtomicU32]>,
    layout: Layout,
    /// The memory as a file, for a process that reads and writes it too.
    file: Option<File>,
}

// SAFETY: the memory is the region's own and is reached through leases only, which keep writers and readers apart.
unsafe impl Send for Region {}
// SAFETY: as above; the counts are atomic.
unsafe impl Sync for Region {}

/// Memory that cannot be used.
///
/// ```
/// use meridian_memory::fabric::{Region, RegionError};
///
/// assert_eq!(Region::allocate(0, 4096).err(), Some(RegionError::Size { blocks: 0, block_bytes: 4096 }));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum RegionError {
    /// No such size.
    #[error("memory of {blocks} blocks of {block_bytes} bytes, expected at least one block of at least one byte")]
    Size {
        /// Blocks.
        blocks: u32,
        /// Bytes of a block.
        block_bytes: u32,
    },
    /// The operating system has no such memory.
    #[error("no memory for {bytes} bytes of KV blocks")]
    NoMemory {
        /// Its bytes.
        bytes: u64,
    },
    /// There is no such block.
    #[error("block {index} of a memory of {blocks} blocks")]
    NoBlock {
        /// The index.
        index: u32,
        /// Blocks.
        blocks: u32,
    },
    /// The block is being read or written.
    #[error("block {index} is in use by a transfer")]
    InUse {
        /// The index.
        index: u32,
    },
    /// Blocks of another size than the node's.
    #[error("memory of blocks of {block_bytes} bytes, expected {expected}")]
    BlockBytes {
        /// Bytes of a block.
        block_bytes: u32,
        /// The node's.
        expected: u32,
    },
    /// The memory is not registered with this node.
    #[error("the memory is not registered")]
    NotRegistered,
}

impl Region {
    /// Zeroed memory.
    ///
    /// # Errors
    /// [`RegionError::Size`], [`RegionError::NoMemory`].
    pub fn allocate(blocks: u32, block_bytes: u32) -> Result<Arc<Self>, RegionError> {
        let layout = layout(blocks, block_bytes)?;
        // SAFETY: the layout is not empty.
        let base = NonNull::new(unsafe { alloc(layout) });
        let base = base.ok_or(RegionError::NoMemory { bytes: layout.size() as u64 })?;
        advise_large_pages(base, layout);
        // SAFETY: the allocation has so many bytes. Not `alloc_zeroed`: that touches the pages while they are small.
        unsafe { base.write_bytes(0, layout.size()) };
        let leases = (0..blocks).map(|_| AtomicU32::new(0)).collect();
        Ok(Arc::new(Self { base, blocks, block_bytes, leases, layout, file: None }))
    }

    /// Zeroed memory that another process can map, by [`Region::shared_path`].
    ///
    /// # Errors
    /// [`RegionError::Size`], [`RegionError::NoMemory`].
    pub fn allocate_shared(blocks: u32, block_bytes: u32) -> Result<Arc<Self>, RegionError> {
        let layout = layout(blocks, block_bytes)?;
        let no_memory = RegionError::NoMemory { bytes: layout.size() as u64 };
        let file = memfd::MemfdOptions::default().create("meridian-kv").map_err(|_| no_memory.clone())?.into_file();
        file.set_len(layout.size() as u64).map_err(|_| no_memory.clone())?;
        // SAFETY: a new mapping, of a file of this length, at no given address.
        let base = unsafe {
            let access = libc::PROT_READ | libc::PROT_WRITE;
            libc::mmap(std::ptr::null_mut(), layout.size(), access, libc::MAP_SHARED, file.as_raw_fd(), 0)
        };
        if base == libc::MAP_FAILED {
            return Err(no_memory);
        }
        let base = NonNull::new(base.cast()).ok_or(no_memory)?;
        let leases = (0..blocks).map(|_| AtomicU32::new(0)).collect();
        Ok(Arc::new(Self { base, blocks, block_bytes, leases, layout, file: Some(file) }))
    }

    /// Where another process of this user finds the memory; `None` unless it is shared.
    #[must_use]
    pub fn shared_path(&self) -> Option<String> {
        self.file.as_ref().map(|file| format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()))
    }

    /// Number of blocks.
    #[must_use]
    pub fn blocks(&self) -> u32 {
        self.blocks
    }

    /// Bytes of a block.
    #[must_use]
    pub fn block_bytes(&self) -> u32 {
        self.block_bytes
    }

    /// Bytes of all blocks.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.layout.size()
    }

    /// The first byte, for libraries that read and write by address.
    #[must_use]
    pub fn address(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Read a block. Nothing writes to it until the lease is dropped.
    ///
    /// # Errors
    /// [`RegionError::NoBlock`], [`RegionError::InUse`].
    pub fn read(self: &Arc<Self>, index: u32) -> Result<ReadLease, RegionError> {
        let lease = self.lease(index)?;
        let add = |count: u32| (count < WRITTEN - 1).then_some(count + 1);
        lease.fetch_update(Ordering::Acquire, Ordering::Relaxed, add).map_err(|_| RegionError::InUse { index })?;
        Ok(ReadLease { region: Arc::clone(self), index })
    }

    /// Write a block. Nothing else reads or writes it until the lease is dropped.
    ///
    /// # Errors
    /// [`RegionError::NoBlock`], [`RegionError::InUse`].
    pub fn write(self: &Arc<Self>, index: u32) -> Result<WriteLease, RegionError> {
        let lease = self.lease(index)?;
        let taken = lease.compare_exchange(0, WRITTEN, Ordering::Acquire, Ordering::Relaxed);
        taken.map_err(|_| RegionError::InUse { index })?;
        Ok(WriteLease { region: Arc::clone(self), index })
    }

    fn lease(&self, index: u32) -> Result<&AtomicU32, RegionError> {
        self.leases.get(index as usize).ok_or(RegionError::NoBlock { index, blocks: self.blocks })
    }

    /// The first byte of an existing block.
    fn start(&self, index: u32) -> *mut u8 {
        debug_assert!(index < self.blocks);
        // SAFETY: the block exists, so the offset is within the allocation.
        unsafe { self.base.as_ptr().add(index as usize * self.block_bytes as usize) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: allocated or mapped with this layout; leases hold the region, so there are none.
        unsafe {
            if self.file.is_some() {
                libc::munmap(self.base.as_ptr().cast(), self.layout.size());
            } else {
                dealloc(self.base.as_ptr(), self.layout);
            }
        }
    }
}

fn layout(blocks: u32, block_bytes: u32) -> Result<Layout, RegionError> {
    let bytes = u64::from(blocks) * u64::from(block_bytes);
    if bytes == 0 {
        return Err(RegionError::Size { blocks, block_bytes });
    }
    let alignment = if bytes < LARGE_PAGE as u64 { ALIGNMENT } else { LARGE_PAGE };
    let layout = usize::try_from(bytes).ok().and_then(|bytes| Layout::from_size_align(bytes, alignment).ok());
    layout.ok_or(RegionError::NoMemory { bytes })
}

/// Ask for large pages, which the kernel may grant on request only. Without them, reads are slower.
fn advise_large_pages(base: NonNull<u8>, layout: Layout) {
    if layout.align() == LARGE_PAGE {
        // SAFETY: advice changes no byte. It covers whole pages, so perhaps some bytes of a neighbour in the last one.
        unsafe { libc::madvise(base.as_ptr().cast(), layout.size(), libc::MADV_HUGEPAGE) };
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { blocks, block_bytes, .. } = self;
        write!(f, "Region({blocks} x {block_bytes} bytes)")
    }
}

/// A block that is read.
#[derive(Debug)]
pub struct ReadLease {
    region: Arc<Region>,
    index: u32,
}

impl ReadLease {
    /// Its first byte, as a number.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.region.start(self.index) as u64
    }
}

impl Deref for ReadLease {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the block exists, is initialized, and is not written while its count of readers is above 0.
        unsafe { slice::from_raw_parts(self.region.start(self.index), self.region.block_bytes as usize) }
    }
}

impl Drop for ReadLease {
    fn drop(&mut self) {
        self.region.leases[self.index as usize].fetch_sub(1, Ordering::Release);
    }
}

/// A block that is written.
#[derive(Debug)]
pub struct WriteLease {
    region: Arc<Region>,
    index: u32,
}

impl WriteLease {
    /// Its first byte, as a number.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.region.start(self.index) as u64
    }
}

impl Deref for WriteLease {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the block exists, is initialized, and only this lease reaches it.
        unsafe { slice::from_raw_parts(self.region.start(self.index), self.region.block_bytes as usize) }
    }
}

impl DerefMut for WriteLease {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and the lease is borrowed mutably.
        unsafe { slice::from_raw_parts_mut(self.region.start(self.index), self.region.block_bytes as usize) }
    }
}

impl Drop for WriteLease {
    fn drop(&mut self) {
        self.region.leases[self.index as usize].store(0, Ordering::Release);
    }
}
