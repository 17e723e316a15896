//! The thread that calls MPI, and no other does.

use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

use dcp_collectives::mesh::Arrivals;
use dcp_core::Rank;
use mpi::Threading;
use mpi::collective::CommunicatorCollectives as _;
use mpi::environment::Universe;
use mpi::point_to_point::{Destination as _, MatchedReceiveVec as _, Source as _};
use mpi::request::Request;
use mpi::topology::{Communicator as _, SimpleCommunicator};

use crate::packet::HEADER;
use crate::post::{BUDGET, Post};

/// The tag of all packets, in a communicator of their own.
const TAG: i32 = 0x0dcb;

/// Packets that are received before packets are sent.
const BATCH: usize = 64;

/// Looks for packets without a pause between them.
const SPINS: u32 = 50;

/// The first and the longest pause of an idle thread.
const FIRST_REST: Duration = Duration::from_micros(20);
const LONGEST_REST: Duration = Duration::from_millis(1);

/// Rank, number of ranks, and the channels that others open.
pub(crate) type Started = Result<(Rank, u32, Arc<Arrivals>), String>;

/// Runs MPI until [`Post::stop`], then ends it once all ranks are there, or not at all when they are
/// not within `patience`.
pub(crate) fn run(post: &Arc<Post>, started: &SyncSender<Started>, patience: Duration) {
    /// Breaks the channels however the thread ends.
    struct End<'a>(&'a Post);
    impl Drop for End<'_> {
        fn drop(&mut self) {
            self.0.end();
        }
    }
    let _end = End(post);
    let (universe, comm) = match initialize(post.max_packet()) {
        Ok(mpi) => mpi,
        Err(message) => return drop(started.send(Err(message))),
    };
    let (Ok(rank), Ok(world_size)) = (u32::try_from(comm.rank()), u32::try_from(comm.size()))
    else {
        return drop(started.send(Err("MPI numbers its ranks below 0".to_owned())));
    };
    let arrivals = Arc::new(Arrivals::new(world_size));
    if started.send(Ok((rank, world_size, Arc::clone(&arrivals)))).is_err() {
        return;
    }
    let engine = Engine { post, comm: &comm, arrivals: &arrivals };
    engine.serve();
    if engine.leave(patience) {
        drop(comm);
        drop(universe);
    } else {
        tracing::warn!("other ranks have not ended: this one leaves MPI without MPI_Finalize");
        std::mem::forget((comm, universe));
    }
}

fn initialize(max_packet: usize) -> Result<(Universe, SimpleCommunicator), String> {
    let (mut universe, threading) = mpi::initialize_with_threading(Threading::Funneled)
        .ok_or("MPI was initialized already in this process, or has ended")?;
    if threading < Threading::Funneled {
        return Err("this MPI allows no threads (MPI_THREAD_FUNNELED)".to_owned());
    }
    // The other half is for packets without bytes, and for gaps.
    let room = 2 * usize::try_from(BUDGET).unwrap_or(usize::MAX) + 2 * (max_packet + HEADER);
    universe.set_buffer_size(room.min(i32::MAX as usize));
    let comm = universe.world().duplicate();
    Ok((universe, comm))
}

struct Engine<'a> {
    post: &'a Arc<Post>,
    comm: &'a SimpleCommunicator,
    arrivals: &'a Arrivals,
}

impl Engine<'_> {
    /// Receives and sends what there is. Returns whether there was anything.
    fn turn(&self) -> bool {
        let mut busy = false;
        let anyone = self.comm.any_process();
        for _ in 0..BATCH {
            let Some(message) = anyone.immediate_matched_probe_with_tag(TAG) else { break };
            let (packet, status) = message.matched_receive_vec::<u8>();
            busy = true;
            if let Ok(from) = Rank::try_from(status.source_rank()) {
                self.post.deliver(from, packet, self.arrivals);
            }
        }
        while let Some((to, packet)) = self.post.take() {
            busy = true;
            if let Ok(to) = i32::try_from(to) {
                self.comm.process_at_rank(to).buffered_send_with_tag(&packet[..], TAG);
            }
        }
        busy
    }

    fn serve(&self) {
        let mut idle = 0;
        while !self.post.is_stopping() {
            idle = if self.turn() { 0 } else { idle + 1 };
            self.rest(idle);
        }
    }

    fn rest(&self, idle: u32) {
        match idle.checked_sub(SPINS) {
            None => std::thread::yield_now(),
            Some(more) => self.post.rest((FIRST_REST * (1 << more.min(8))).min(LONGEST_REST)),
        }
    }

    /// Waits until every rank has sent and received everything.
    fn leave(&self, patience: Duration) -> bool {
        let begun = Instant::now();
        let mut barrier: Option<Request<'static, ()>> = None;
        loop {
            let busy = self.turn();
            if self.post.is_drained() {
                let request = match barrier.take() {
                    Some(request) => request,
                    None => self.comm.immediate_barrier(),
                };
                match request.test() {
                    Ok(_) => return true,
                    Err(request) => barrier = Some(request),
                }
            }
            if begun.elapsed() > patience {
                std::mem::forget(barrier);
                return false;
            }
            if !busy {
                std::thread::sleep(FIRST_REST);
            }
        }
    }
}
