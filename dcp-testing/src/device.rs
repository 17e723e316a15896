//! A device whose memory is a vector, for tests of shards on devices.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use bytes::Bytes;
use dcp_core::HostMemory;
use dcp_core::device::{DeviceError, DeviceMemory};

/// What was copied from and to devices.
#[derive(Debug, Default)]
pub struct Traffic {
    copies: AtomicU64,
    largest: AtomicU64,
    in_flight: AtomicU64,
    most_in_flight: AtomicU64,
    fails: AtomicBool,
}

impl Traffic {
    /// The number of copies.
    pub fn copies(&self) -> u64 {
        self.copies.load(Ordering::Relaxed)
    }

    /// The bytes of the largest copy.
    pub fn largest(&self) -> u64 {
        self.largest.load(Ordering::Relaxed)
    }

    /// The most bytes in host memory at once that came from a device, or go to one.
    pub fn most_in_flight(&self) -> u64 {
        self.most_in_flight.load(Ordering::Relaxed)
    }

    /// The bytes of copies that are in host memory now.
    pub fn in_flight(&self) -> u64 {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// Lets every later copy fail.
    pub fn fail(&self) {
        self.fails.store(true, Ordering::Relaxed);
    }

    /// Counts bytes that host memory holds for a device from now on.
    pub fn enter(&self, bytes: u64) {
        let now = self.in_flight.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.most_in_flight.fetch_max(now, Ordering::Relaxed);
    }

    /// The end of [`enter`](Self::enter).
    pub fn leave(&self, bytes: u64) {
        self.in_flight.fetch_sub(bytes, Ordering::Relaxed);
    }

    fn copy(&self, bytes: u64) -> Result<(), DeviceError> {
        if self.fails.load(Ordering::Relaxed) {
            return Err("the device fell off the bus".into());
        }
        self.copies.fetch_add(1, Ordering::Relaxed);
        self.largest.fetch_max(bytes, Ordering::Relaxed);
        Ok(())
    }
}

/// A device whose memory is a vector.
#[derive(Debug)]
pub struct FakeDevice {
    name: String,
    memory: Mutex<Vec<u8>>,
    traffic: Arc<Traffic>,
}

impl FakeDevice {
    /// A device `fake:0` with these bytes, which counts in `traffic`.
    pub fn new(bytes: Vec<u8>, traffic: &Arc<Traffic>) -> Arc<Self> {
        let (name, memory) = ("fake:0".to_owned(), Mutex::new(bytes));
        Arc::new(Self { name, memory, traffic: Arc::clone(traffic) })
    }

    /// The bytes of the device.
    pub fn bytes(&self) -> Vec<u8> {
        self.memory.lock().unwrap().clone()
    }
}

/// Bytes that count as in flight until they are dropped.
struct Counted(Vec<u8>, Arc<Traffic>);

impl AsRef<[u8]> for Counted {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.1.leave(self.0.len() as u64);
    }
}

fn indices(range: &Range<u64>) -> Range<usize> {
    usize::try_from(range.start).unwrap()..usize::try_from(range.end).unwrap()
}

/// Fails unless the ranges ascend and share no byte, as the contract says.
fn check(ranges: &[Range<u64>]) {
    let apart = ranges.windows(2).all(|pair| pair[0].end <= pair[1].start);
    assert!(apart && ranges.iter().all(|range| range.start < range.end), "{ranges:?}");
}

#[async_trait]
impl DeviceMemory for FakeDevice {
    fn device(&self) -> &str {
        &self.name
    }

    fn byte_len(&self) -> u64 {
        self.memory.lock().unwrap().len() as u64
    }

    async fn read(&self, ranges: &[Range<u64>]) -> Result<Bytes, DeviceError> {
        check(ranges);
        // Others run while a device copies.
        tokio::task::yield_now().await;
        let bytes = {
            let memory = self.memory.lock().unwrap();
            ranges.iter().map(|range| &memory[indices(range)]).collect::<Vec<_>>().concat()
        };
        self.traffic.copy(bytes.len() as u64)?;
        self.traffic.enter(bytes.len() as u64);
        Ok(Bytes::from_owner(Counted(bytes, Arc::clone(&self.traffic))))
    }

    async fn write(&self, ranges: &[Range<u64>], mut bytes: Bytes) -> Result<(), DeviceError> {
        check(ranges);
        tokio::task::yield_now().await;
        self.traffic.copy(bytes.len() as u64)?;
        let mut memory = self.memory.lock().unwrap();
        for range in ranges {
            let range = indices(range);
            memory[range.clone()].copy_from_slice(&bytes.split_to(range.len()));
        }
        assert!(bytes.is_empty(), "the ranges have fewer bytes");
        Ok(())
    }

    fn staging(&self, _: usize) -> Option<HostMemory> {
        None
    }
}
