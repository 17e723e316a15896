//! Every clause of `Collective` on the processes of an MPI job.
//!
//! Rank 0 runs the suite. Each member of a group that the suite builds is a connection to the process
//! of that rank, which makes the calls.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test; the suite reports a group that cannot be formed as a panic"
)]

mod job;
mod remote;

use std::net::{Ipv4Addr, TcpListener};
use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use dcp_collectives_mpi::MpiConfig;
use dcp_conformance::collective::trials;
use dcp_core::Collective;

use crate::remote::{Member, quit, serve};

/// The largest group of the suite.
const RANKS: u32 = 8;

fn main() -> ExitCode {
    if job::case().is_none() {
        return job::verdict("conformance", &job::run(RANKS, "conformance"), true);
    }
    // Small packets, so that the large messages of the suite are split often.
    let world = Arc::new(MpiConfig::new().max_packet(10_000).connect().unwrap());
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let ports = world.all_gather(port.to_le_bytes().to_vec().into()).unwrap();
    let ports: Vec<u16> =
        ports.iter().map(|port| u16::from_le_bytes(port[..].try_into().unwrap())).collect();
    let server = thread::spawn({
        let world = Arc::clone(&world);
        move || serve(&listener, &world)
    });
    let code = if world.rank() == 0 {
        let building = Mutex::new(());
        let code = dcp_conformance::run(trials("mpi", {
            let ports = ports.clone();
            Arc::new(move |world_size: u32, deadline: Duration| {
                // One group after the other: all ranks make the same subgroups in the same order.
                let _building = building.lock().unwrap();
                let members = ports.iter().zip(0..world_size);
                let members: Vec<_> = members
                    .map(|(port, rank)| Member::request(*port, rank, world_size, deadline))
                    .collect();
                members
                    .into_iter()
                    .map(|member| Box::new(member.ready()) as Box<dyn Collective>)
                    .collect()
            })
        }));
        ports.iter().for_each(|port| quit(*port));
        code
    } else {
        ExitCode::SUCCESS
    };
    server.join().unwrap();
    code
}
