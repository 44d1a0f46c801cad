from shared.store import open_store
from tests.contract.driver import *

async def test_pg(postgres_settings):
    store = await open_store(postgres_settings).open()
    talk = Talk(store)
    await talk.answered("one"); await talk.answered("two")
    print(await talk.event_names())
    await store.close()

async def test_pgb(postgres_settings):
    store = await open_store(postgres_settings).open()
    await store.close()

async def test_sb(supabase_settings):
    store = await open_store(supabase_settings).open()
    talk = Talk(store)
    await talk.answered("one")
    print(await talk.event_names(), await store.health())
    await store.close()
