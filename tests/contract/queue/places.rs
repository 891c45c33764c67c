//! The bound of a lane: unacknowledged messages never exceed its places, over stops, resumes and changes of them.

use super::*;

pub async fn prefetch_is_never_exceeded(queue: Arc<dyn Queue>) {
    queue.declare(&[provider("stripe")]).await.unwrap();
    publish_all(&*queue, "stripe", &["1", "2", "3", "4", "5", "6"]).await;
    let mut lane = queue.open_lane(&provider("stripe"), 3).await.unwrap();
    let mut held = take_many(&mut *lane, 3).await;
    assert_quiet(&mut *lane).await;
    await_depth(&*queue, "stripe", 3).await;
    held.pop().unwrap().receipt.ack().await.unwrap();
    held.push(take(&mut *lane).await);
    assert_quiet(&mut *lane).await;
    assert_eq!(held.len(), 3);
}

pub async fn lane_grows_and_shrinks_with_open_receipts(queue: Arc<dyn Queue>) {
    queue.declare(&[provider("stripe")]).await.unwrap();
    publish_all(&*queue, "stripe", &["1", "2", "3", "4", "5", "6", "7", "8"]).await;
    let mut lane = queue.open_lane(&provider("stripe"), 2).await.unwrap();
    let mut held = take_many(&mut *lane, 2).await;
    lane.resize(5).await.unwrap();
    held.extend(take_many(&mut *lane, 3).await);
    assert_quiet(&mut *lane).await;
    lane.resize(2).await.unwrap();
    // Five are out, so the fourth that is finished makes the first place free.
    for _ in 0..3 {
        held.pop().unwrap().receipt.ack().await.unwrap();
    }
    assert_quiet(&mut *lane).await;
    held.pop().unwrap().receipt.ack().await.unwrap();
    held.push(take(&mut *lane).await);
    assert_quiet(&mut *lane).await;
    // While it is stopped, too.
    lane.stop().await.unwrap();
    lane.resize(3).await.unwrap();
    assert!(tokio::time::timeout(PATIENCE, lane.next()).await.unwrap().unwrap().is_none());
    lane.resume().await.unwrap();
    held.push(take(&mut *lane).await);
    assert_quiet(&mut *lane).await;
    for delivery in held {
        delivery.receipt.ack().await.unwrap();
    }
    take(&mut *lane).await.receipt.ack().await.unwrap();
    assert_eq!(queue.depth(&provider("stripe")).await.unwrap(), Some(0));
}

pub async fn lane_stops_and_resumes_with_open_receipts(queue: Arc<dyn Queue>) {
    queue.declare(&[provider("stripe")]).await.unwrap();
    publish_all(&*queue, "stripe", &["1", "2", "3"]).await;
    let mut lane = queue.open_lane(&provider("stripe"), 3).await.unwrap();
    let first = take(&mut *lane).await;
    // The other two messages have arrived, or arrive now. They are delivered before the end.
    await_depth(&*queue, "stripe", 0).await;
    lane.stop().await.unwrap();
    publish_all(&*queue, "stripe", &["4", "5"]).await;
    let mut held = vec![first];
    while let Some(delivery) = tokio::time::timeout(PATIENCE, lane.next()).await.unwrap().unwrap() {
        held.push(delivery);
    }
    assert_eq!(bodies(&held), set(&["1", "2", "3"]));
    assert!(lane.next().await.unwrap().is_none(), "still stopped");
    held.pop().unwrap().receipt.ack().await.unwrap();
    await_depth(&*queue, "stripe", 2).await;

    lane.resume().await.unwrap();
    // Two messages are unacknowledged, so the prefetch of three allows one more.
    held.push(take(&mut *lane).await);
    assert_quiet(&mut *lane).await;
    for delivery in held {
        delivery.receipt.ack().await.unwrap();
    }
    let last = take(&mut *lane).await;
    assert_eq!(&last.body[..], b"5");
    last.receipt.ack().await.unwrap();

    // Repeatedly, without unacknowledged messages.
    for _ in 0..3 {
        lane.stop().await.unwrap();
        lane.stop().await.unwrap();
        assert!(tokio::time::timeout(PATIENCE, lane.next()).await.unwrap().unwrap().is_none());
        lane.resume().await.unwrap();
        lane.resume().await.unwrap();
    }
    publish_all(&*queue, "stripe", &["6"]).await;
    take(&mut *lane).await.receipt.ack().await.unwrap();
}
