//! Threads that wait for copies, so that no task of a runtime does.
//!
//! A copy goes to the thread of its direction after its start. The thread waits for copies in the order in
//! which they come, and sends each result to its caller. The copy, with its host memory and its permit, is
//! the thread's and not the caller's: a caller that is dropped frees neither while the device still uses
//! them. A thread that has panicked is replaced at the next copy.

use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use dcp_core::memory::Buffer;
use tokio::sync::{OwnedSemaphorePermit, oneshot};

use crate::device::Device;
use crate::error::StagingError;

/// The copies in one direction that were started, which a thread waits for in their order. The thread
/// starts with the first copy, and ends after the last one when this is dropped.
#[derive(Debug)]
pub(crate) struct Completion<D: Device> {
    device: Arc<D>,
    jobs: Mutex<Option<Sender<Job<D>>>>,
}

/// A copy, and the channel to its caller.
struct Job<D: Device> {
    copy: D::Copy,
    byte_len: usize,
    /// Of the copy's chunk, which is free again after the copy, whether or not the caller waits.
    permit: Option<OwnedSemaphorePermit>,
    done: oneshot::Sender<Result<Arrived, StagingError>>,
}

/// The result of a copy that has ended.
#[derive(Debug)]
pub(crate) struct Arrived {
    /// The memory that a read has filled.
    pub(crate) buffer: Option<Buffer>,
    _permit: Option<OwnedSemaphorePermit>,
}

/// A copy under way.
#[derive(Debug)]
pub(crate) struct Pending {
    device: String,
    done: oneshot::Receiver<Result<Arrived, StagingError>>,
}

impl Pending {
    pub(crate) async fn finish(self) -> Result<Arrived, StagingError> {
        let panicked = |_| {
            let problem = "it has panicked".to_owned();
            StagingError::NoThread { device: self.device, problem }
        };
        self.done.await.map_err(panicked)?
    }
}

impl<D: Device> Completion<D> {
    pub(crate) fn new(device: Arc<D>) -> Self {
        Self { device, jobs: Mutex::default() }
    }

    /// Waits for `copy` of `byte_len` bytes on the thread.
    pub(crate) fn watch(
        &self,
        copy: D::Copy,
        byte_len: usize,
        permit: Option<OwnedSemaphorePermit>,
    ) -> Result<Pending, StagingError> {
        let (sender, done) = oneshot::channel();
        let mut job = Job { copy, byte_len, permit, done: sender };
        let mut jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(jobs) = &*jobs {
            match jobs.send(job) {
                Ok(()) => return Ok(self.pending(done)),
                // The thread has panicked: another one takes its place.
                Err(refused) => job = refused.0,
            }
        }
        let started = jobs.insert(self.start()?);
        let ended = |_| self.no_thread("it ended at once".to_owned());
        started.send(job).map_err(ended)?;
        Ok(self.pending(done))
    }

    fn pending(&self, done: oneshot::Receiver<Result<Arrived, StagingError>>) -> Pending {
        Pending { device: self.device.name().to_owned(), done }
    }

    fn start(&self) -> Result<Sender<Job<D>>, StagingError> {
        let (jobs, work) = mpsc::channel::<Job<D>>();
        let device = Arc::clone(&self.device);
        let run = move || work.into_iter().for_each(|job| job.run(&*device));
        let started = thread::Builder::new().name("dcp-cuda".to_owned()).spawn(run);
        started.map_err(|error| self.no_thread(error.to_string()))?;
        Ok(jobs)
    }

    fn no_thread(&self, problem: String) -> StagingError {
        StagingError::NoThread { device: self.device.name().to_owned(), problem }
    }
}

impl<D: Device> Job<D> {
    fn run(self, device: &D) {
        let waited = device.wait(self.copy);
        let arrived = match waited {
            Ok(buffer) => Ok(Arrived { buffer, _permit: self.permit }),
            Err(source) => {
                let device = device.name().to_owned();
                Err(StagingError::Copy { device, byte_len: self.byte_len, source })
            }
        };
        // Without a receiver the bytes are of no interest.
        drop(self.done.send(arrived));
    }
}
