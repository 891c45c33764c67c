//! Refusals by the broker that concern one lane or one check: they quote the broker, and no other lane is affected.

use super::*;

/// Rights on every queue except those of providers that begin with `bolt`.
const NO_BOLTS: &str = r"^(?!payments\.bolt).*";

struct Broker {
    /// Has all rights.
    guest: Arc<dyn Queue>,
    /// Connects as the user with limited rights.
    limited_url: String,
}

/// Creates a virtual host, and a user of the same name with these rights.
async fn broker(name: &'static str, rights: &'static str) -> Broker {
    let bench = bench(name).await;
    let make_user = move || RabbitNode::shared().create_user(name, name, rights);
    tokio::task::spawn_blocking(make_user).await.unwrap();
    let limited_url = bench.url.replace("guest:guest", &format!("{name}:{name}"));
    Broker { guest: bench.queue, limited_url }
}

async fn ctl(args: &[&str]) -> String {
    let args: Vec<String> = args.iter().map(|arg| (*arg).to_owned()).collect();
    let run = move || RabbitNode::shared().ctl(&args.iter().map(String::as_str).collect::<Vec<_>>());
    tokio::task::spawn_blocking(run).await.unwrap()
}

fn refusal<T>(answer: Result<T, QueueError>) -> String {
    match answer.err().expect("the broker refuses it") {
        QueueError::Refused(words) => words,
        other => panic!("{other}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn refused_declarations_end_no_lane() {
    let broker = broker("refused_declarations_end_no_lane", NO_BOLTS).await;
    let bolts: Vec<_> = (0..24).map(|number| provider(&format!("bolt{number}"))).collect();
    let all: Vec<_> = [provider("acme")].into_iter().chain(bolts.clone()).collect();
    broker.guest.declare(&all).await.unwrap();
    let queue = connect(&broker.limited_url);
    queue.declare(&all[..1]).await.unwrap();
    let mut lane = queue.open_lane(&provider("acme"), 2).await.unwrap();
    publish_all(&*broker.guest, "acme", &["held"]).await;
    let held = take(&mut *lane).await;

    for cut_ms in (0..60).step_by(3) {
        // The caller may give up before the broker has answered.
        let cut = std::time::Duration::from_millis(cut_ms);
        drop(tokio::time::timeout(cut, queue.topology_problems(&all)).await);
        drop(tokio::time::timeout(cut, queue.declare(&bolts[..1])).await);
        drop(queue.topology_problems(&bolts).await);
    }
    held.receipt.ack().await.unwrap();
    publish_all(&*broker.guest, "acme", &["next"]).await;
    let next = take(&mut *lane).await;
    assert_eq!((&next.body[..], next.redelivered), (&b"next"[..], false));
    next.receipt.ack().await.unwrap();

    let words = refusal(queue.declare(&bolts[..1]).await);
    assert!(words.contains("ACCESS_REFUSED") && words.contains("payments.bolt0"), "{words}");
    let unfit = queue.topology_problems(&all).await.unwrap();
    assert_eq!(unfit.len(), bolts.len(), "{unfit:?}");
    assert!(unfit.iter().all(|line| line.to_string().contains("ACCESS_REFUSED")), "{unfit:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn refused_lane_ends_no_other() {
    let broker = broker("refused_lane_ends_no_other", NO_BOLTS).await;
    let (acme, bolt) = (provider("acme"), provider("bolt"));
    broker.guest.declare(&[acme.clone(), bolt.clone()]).await.unwrap();
    let queue = connect(&broker.limited_url);
    let mut lane = queue.open_lane(&acme, 2).await.unwrap();
    publish_all(&*broker.guest, "acme", &["held"]).await;
    let held = take(&mut *lane).await;
    for _ in 0..20 {
        let words = refusal(queue.open_lane(&bolt, 2).await.map(drop));
        assert!(words.contains("ACCESS_REFUSED") && words.contains("payments.bolt"), "{words}");
    }
    held.receipt.ack().await.unwrap();
    publish_all(&*broker.guest, "acme", &["next"]).await;
    assert!(!take(&mut *lane).await.redelivered);
}

/// The numbers of a connection's channels are few, and are used again.
#[tokio::test(flavor = "multi_thread")]
async fn refusal_affects_no_later_channel() {
    const NAME: &str = "refusal_affects_no_later_channel";
    let broker = broker(NAME, NO_BOLTS).await;
    let (acme, bolt) = (provider("acme"), provider("bolt"));
    broker.guest.declare(&[acme.clone(), bolt.clone()]).await.unwrap();
    let queue = connect(&format!("{}?channel_max=40", broker.limited_url));
    let mut lane = queue.open_lane(&acme, 2).await.unwrap();
    for _ in 0..100 {
        refusal(queue.declare(std::slice::from_ref(&bolt)).await);
        refusal(queue.open_lane(&bolt, 2).await.map(drop));
        assert_eq!(queue.depth(&acme).await.unwrap(), Some(0));
        queue.open_lane(&acme, 2).await.unwrap();
    }
    publish_all(&*broker.guest, "acme", &["paid"]).await;
    assert!(!take(&mut *lane).await.redelivered);
    // A connection whose channel numbers are used up closes with its last channel. The open lane keeps the first
    // connection.
    let count = async || ctl(&["list_connections", "user"]).await.lines().filter(|user| *user == NAME).count();
    let deadline = std::time::Instant::now() + PATIENCE;
    while count().await > 4 {
        assert!(std::time::Instant::now() < deadline, "{} connections", count().await);
    }
}

/// A queue that may not be created is not reported as a queue with other arguments, which an operator would delete.
#[tokio::test(flavor = "multi_thread")]
async fn queue_limit_error_quotes_the_broker() {
    const VHOST: &str = "queue_limit_error_quotes_the_broker";
    let bench = bench(VHOST).await;
    bench.queue.declare(&[provider("acme")]).await.unwrap();
    ctl(&["set_vhost_limits", "-p", VHOST, r#"{"max-queues":1}"#]).await;
    let words = refusal(bench.queue.declare(&[provider("bolt")]).await);
    assert!(words.contains("queue `payments.bolt`") && words.contains("limit"), "{words}");
    assert!(!words.contains("delete"), "{words}");
}

#[tokio::test(flavor = "multi_thread")]
async fn more_lanes_than_channels_end_no_lane() {
    let bench = bench("more_lanes_than_channels_end_no_lane").await;
    let lanes = ["acme", "bolt", "crate"].map(provider);
    bench.queue.declare(&lanes).await.unwrap();
    let queue = connect(&format!("{}?channel_max=2", bench.url));
    let mut first = queue.open_lane(&lanes[0], 2).await.unwrap();
    let second = queue.open_lane(&lanes[1], 2).await.unwrap();
    let words = refusal(queue.open_lane(&lanes[2], 2).await.map(drop));
    assert!(words.contains("2 channels") && words.contains("channel_max"), "{words}");
    publish_all(&*bench.queue, "acme", &["paid"]).await;
    assert!(!take(&mut *first).await.redelivered);
    drop(second);
    let deadline = std::time::Instant::now() + PATIENCE;
    while let Err(error) = queue.open_lane(&lanes[2], 2).await {
        assert!(std::time::Instant::now() < deadline, "{error}");
    }
}

/// The broker closes the connection of a user that opens one channel too many.
#[tokio::test(flavor = "multi_thread")]
async fn user_channel_limit_ends_no_lane_repeatedly() {
    const USER: &str = "user_channel_limit_ends_no_lane_repeatedly";
    let broker = broker(USER, ".*").await;
    let lanes: Vec<_> = (0..6).map(|number| provider(&format!("lane{number}"))).collect();
    broker.guest.declare(&lanes).await.unwrap();
    ctl(&["set_user_limits", USER, r#"{"max-channels":4}"#]).await;
    let queue = connect(&broker.limited_url);
    let (mut open, mut refused, mut ended) = (Vec::new(), 0, 0);
    let deadline = std::time::Instant::now() + PATIENCE;
    // As a worker does, the test opens closed lanes again and retries refused ones.
    while refused < 20 {
        assert!(std::time::Instant::now() < deadline, "{} open, {refused} refused", open.len());
        for lane in &lanes {
            if open.iter().any(|(name, _)| name == lane) {
                continue;
            }
            match queue.open_lane(lane, 1).await {
                Ok(opened) => open.push((lane.clone(), opened)),
                Err(QueueError::Refused(words)) => {
                    assert!(words.contains("max-channels") && words.contains("user limit"), "{words}");
                    refused += 1;
                }
                Err(QueueError::Unavailable(_)) => {}
                Err(other) => panic!("{other}"),
            }
        }
        let mut still = Vec::new();
        for (name, mut lane) in open {
            match tokio::time::timeout(std::time::Duration::from_millis(1), lane.next()).await {
                Err(_) => still.push((name, lane)),
                Ok(Err(_)) => ended += 1,
                Ok(Ok(_)) => panic!("nothing was published"),
            }
        }
        open = still;
    }
    assert!(open.len() >= 2 && ended <= 4, "{} open; {ended} were ended", open.len());
    // After the limit is lifted, the other lanes open, too.
    ctl(&["clear_user_limits", USER, "max-channels"]).await;
    for lane in &lanes {
        if open.iter().any(|(name, _)| name == lane) {
            continue;
        }
        let opened = loop {
            match queue.open_lane(lane, 1).await {
                Ok(opened) => break opened,
                Err(error) => assert!(std::time::Instant::now() < deadline + PATIENCE, "{error}"),
            }
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        };
        open.push((lane.clone(), opened));
    }
    for (name, lane) in &mut open {
        publish_all(&*broker.guest, name.as_str(), &["paid"]).await;
        assert!(!take(&mut **lane).await.redelivered);
    }
}
