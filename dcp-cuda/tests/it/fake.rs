//! A device whose memory is a vector and whose copies a thread makes, late and in any order.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;

use bytes::Bytes;
use dcp_core::HostMemory;
use dcp_core::device::DeviceError;
use dcp_core::memory::Buffer;
use dcp_cuda::Device;

/// The memory of a tensor on the fake device.
#[derive(Debug)]
pub(crate) struct FakeMemory(Mutex<Vec<u8>>);

impl FakeMemory {
    pub(crate) fn new(bytes: Vec<u8>) -> Arc<Self> {
        Arc::new(Self(Mutex::new(bytes)))
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        self.0.lock().unwrap().clone()
    }
}

/// What the device did, and what it is to do next.
#[derive(Debug, Default)]
pub(crate) struct Control {
    pub(crate) started: AtomicU64,
    pub(crate) ended: AtomicU64,
    pinned: Mutex<Pinned>,
    /// Address and length of all memory that was pinned.
    addresses: Mutex<Vec<(usize, usize)>>,
    pinning_fails: AtomicBool,
    copies_fail: AtomicBool,
    /// A copy that fails may still be under way: its memory is never returned.
    failures_leak: AtomicBool,
    /// Copies are made while this is not set.
    held: Mutex<bool>,
    changed: Condvar,
}

/// Memory that was pinned. What is lent of it is pinned still.
#[derive(Debug, Default)]
struct Pinned {
    allocations: Vec<HostMemory>,
    peak: usize,
}

impl Pinned {
    fn now(&self) -> usize {
        let is_used = |memory: &&HostMemory| memory.lend(0..memory.len()).is_err();
        self.allocations.iter().filter(is_used).map(HostMemory::len).sum()
    }
}

impl Control {
    pub(crate) fn fail_pinning(&self, fails: bool) {
        self.pinning_fails.store(fails, Ordering::SeqCst);
    }

    pub(crate) fn fail_copies(&self, fails: bool) {
        self.copies_fail.store(fails, Ordering::SeqCst);
    }

    pub(crate) fn leak_failures(&self, leak: bool) {
        self.failures_leak.store(leak, Ordering::SeqCst);
    }

    /// Makes no copies, or goes on.
    pub(crate) fn hold(&self, held: bool) {
        *self.held.lock().unwrap() = held;
        self.changed.notify_all();
    }

    /// Waits until so many copies were started.
    pub(crate) fn wait_for_starts(&self, count: u64) {
        let mut held = self.held.lock().unwrap();
        while self.started.load(Ordering::SeqCst) < count {
            held = self.changed.wait(held).unwrap();
        }
    }

    pub(crate) fn pinned_now(&self) -> usize {
        self.pinned.lock().unwrap().now()
    }

    pub(crate) fn pinned_peak(&self) -> usize {
        self.pinned.lock().unwrap().peak
    }

    pub(crate) fn allocations(&self) -> usize {
        self.pinned.lock().unwrap().allocations.len()
    }

    fn wait_while_held(&self) {
        let mut held = self.held.lock().unwrap();
        while *held {
            held = self.changed.wait(held).unwrap();
        }
    }

    fn start(&self) {
        // Under the lock, so that no waiter misses it.
        let _held = self.held.lock().unwrap();
        self.started.fetch_add(1, Ordering::SeqCst);
        self.changed.notify_all();
    }

    /// Fails unless the device can copy these bytes directly.
    fn check_pinned(&self, bytes: &[u8]) {
        let start = bytes.as_ptr().addr();
        let pinned = self.addresses.lock().unwrap();
        let inside = |(at, len): &(usize, usize)| start >= *at && start + bytes.len() <= at + len;
        assert!(bytes.is_empty() || pinned.iter().any(inside), "a copy of pageable memory");
    }
}

#[derive(Debug)]
pub(crate) struct FakeGpu {
    control: Arc<Control>,
    work: Mutex<Sender<Work>>,
}

type Outcome = Result<Option<Buffer>, String>;

/// A copy that the thread makes.
struct Work {
    memory: Arc<FakeMemory>,
    ranges: Vec<Range<u64>>,
    host: Host,
    done: Sender<Outcome>,
}

enum Host {
    Read(Buffer),
    Write(Bytes),
}

pub(crate) struct FakeCopy(Receiver<Outcome>);

impl FakeGpu {
    pub(crate) fn new() -> (Self, Arc<Control>) {
        let control = Arc::new(Control::default());
        let (work, jobs) = mpsc::channel();
        let run = {
            let control = Arc::clone(&control);
            move || copy_in_any_order(&jobs, &control)
        };
        thread::spawn(run);
        (Self { control: Arc::clone(&control), work: Mutex::new(work) }, control)
    }

    fn start(
        &self,
        memory: &Arc<FakeMemory>,
        ranges: &[Range<u64>],
        host: Host,
    ) -> Result<FakeCopy, DeviceError> {
        let (done, copy) = mpsc::channel();
        let bytes = match &host {
            Host::Read(buffer) => &buffer[..],
            Host::Write(bytes) => bytes,
        };
        self.control.check_pinned(bytes);
        let total: u64 = ranges.iter().map(|range| range.end - range.start).sum();
        assert_eq!(bytes.len() as u64, total);
        assert!(ranges.windows(2).all(|pair| pair[0].end <= pair[1].start), "{ranges:?}");
        let work = Work { memory: Arc::clone(memory), ranges: ranges.to_vec(), host, done };
        self.work.lock().unwrap().send(work).map_err(|_| "the thread has ended")?;
        self.control.start();
        Ok(FakeCopy(copy))
    }
}

/// Makes the copies that wait, each time another one first.
fn copy_in_any_order(jobs: &Receiver<Work>, control: &Control) {
    let (mut waiting, mut turn) = (Vec::new(), 1_usize);
    loop {
        if waiting.is_empty() {
            let Ok(job) = jobs.recv() else { return };
            waiting.push(job);
        }
        control.wait_while_held();
        waiting.extend(jobs.try_iter());
        turn = turn.wrapping_mul(1_103_515_245).wrapping_add(12_345);
        let job = waiting.swap_remove((turn >> 16) % waiting.len());
        let outcome = copy(job.memory, &job.ranges, job.host, control);
        control.ended.fetch_add(1, Ordering::SeqCst);
        drop(job.done.send(outcome));
    }
}

fn copy(memory: Arc<FakeMemory>, ranges: &[Range<u64>], host: Host, control: &Control) -> Outcome {
    if control.copies_fail.load(Ordering::SeqCst) {
        if control.failures_leak.load(Ordering::SeqCst) {
            std::mem::forget(host);
        }
        return Err("the device fell off the bus".to_owned());
    }
    let mut memory = memory.0.lock().unwrap();
    let indices = ranges.iter().map(|range| range.start as usize..range.end as usize);
    match host {
        Host::Read(mut buffer) => {
            let mut at = 0;
            for range in indices {
                let next = at + range.len();
                buffer[at..next].copy_from_slice(&memory[range]);
                at = next;
            }
            Ok(Some(buffer))
        }
        Host::Write(mut bytes) => {
            for range in indices {
                let part = bytes.split_to(range.len());
                memory[range].copy_from_slice(&part);
            }
            Ok(None)
        }
    }
}

impl Device for FakeGpu {
    type Memory = FakeMemory;
    type Copy = FakeCopy;

    fn name(&self) -> &str {
        "fake:3"
    }

    fn byte_len(&self, memory: &FakeMemory) -> u64 {
        memory.0.lock().unwrap().len() as u64
    }

    fn pinned(&self, byte_len: usize) -> Result<HostMemory, DeviceError> {
        if self.control.pinning_fails.load(Ordering::SeqCst) {
            return Err("out of locked memory".into());
        }
        let memory = HostMemory::zeroed(byte_len);
        let address = memory.read()?.as_ptr().addr();
        self.control.addresses.lock().unwrap().push((address, byte_len));
        let pinned = HostMemory::from(memory.lend(0..byte_len)?);
        let mut all = self.control.pinned.lock().unwrap();
        all.allocations.push(memory);
        all.peak = all.peak.max(all.now());
        Ok(pinned)
    }

    fn start_read(
        &self,
        memory: &Arc<FakeMemory>,
        ranges: &[Range<u64>],
        into: Buffer,
    ) -> Result<FakeCopy, DeviceError> {
        self.start(memory, ranges, Host::Read(into))
    }

    fn start_write(
        &self,
        memory: &Arc<FakeMemory>,
        ranges: &[Range<u64>],
        from: Bytes,
    ) -> Result<FakeCopy, DeviceError> {
        self.start(memory, ranges, Host::Write(from))
    }

    fn wait(&self, copy: FakeCopy) -> Result<Option<Buffer>, DeviceError> {
        Ok(copy.0.recv()??)
    }
}
