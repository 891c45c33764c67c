import amqp from "amqplib";

const payments = [{ id: "invoice-4713", amount: 1299, currency: "EUR", account: "customer-17" }];

const connection = await amqp.connect(process.env.AMQP_URL);
const channel = await connection.createConfirmChannel();
const returned = new Set();
channel.on("return", (message) => returned.add(message.properties.messageId));
for (const payment of payments) {
  // The routing key is the provider's name.
  channel.publish("payments", "acme", Buffer.from(JSON.stringify(payment)), {
    contentType: "application/json",
    persistent: true,
    mandatory: true, // comes back as "return" when no queue takes it, before it is confirmed
    messageId: payment.id,
  });
}
await channel.waitForConfirms(); // rejects when the broker refuses one
await connection.close();
if (returned.size > 0) throw new Error(`no queue takes ${[...returned].join(", ")}`);
